// A button on each block of code that copies it: of a session, only what was typed.
for (const block of document.querySelectorAll("div.highlight")) {
  const code = block.querySelector("pre");
  if (!navigator.clipboard || !code) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const lines = code.textContent.trimEnd().split("\n");
    const typed = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4));
    await navigator.clipboard.writeText((typed.length ? typed : lines).join("\n") + "\n");
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  block.append(button);
}

// A table or a block of code that is wider than its box says so above it.
for (const box of document.querySelectorAll(".table-wrapper, div.highlight > pre")) {
  const hint = document.createElement("p");
  hint.className = "sideways";
  hint.textContent = "scrolls sideways →";
  hint.setAttribute("aria-hidden", "true");
  box.before(hint);
  new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth; }).observe(box);
}
