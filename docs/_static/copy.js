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
