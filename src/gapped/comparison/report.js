// A table that fits its box needs no word on scrolling.
for (const hint of document.querySelectorAll(".hint")) {
  const box = hint.nextElementSibling;
  new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth; }).observe(box);
}

// Click a column's name to sort by it. Without this the tables stand as they are, best first.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by " + head.textContent;
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const key = (row) => row.cells[column].dataset.value;
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === undefined && y === undefined) {
          const order = a.cells[column].textContent.localeCompare(b.cells[column].textContent);
          return down ? -order : order;
        }
        // Rows without a number stay at the end, whichever way the others go.
        if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
        return down ? y - x : x - y;
      });
      table.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}

// Type into the field above a long table to see only the rows in which every word of it begins a word.
for (const table of document.querySelectorAll("table.sortable")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 15) continue;
  const input = document.createElement("input");
  input.type = "search";
  input.className = "filter";
  input.placeholder = "Filter: words, or how they begin";
  input.setAttribute("aria-label", "Filter the rows of: " + table.caption.textContent);
  const count = document.createElement("output");
  table.closest(".scroll").before(input, count);
  const filter = () => {
    const words = input.value.split(/\s+/).map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    // A number is one word: 5 does not find 0.5.
    const starts = words.map((word) => new RegExp("(^|[^\\p{L}\\p{N}.])" + word, "iu"));
    for (const row of rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ");
      row.hidden = !starts.every((start) => start.test(text));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown ? `${shown} of ${rows.length} rows` : "No row has all of these words.";
  };
  input.addEventListener("input", filter);
  filter();
}

// Point at a spot of a figure, or tap it, to read its number. Without this the browser shows it after a while.
const label = document.createElement("div");
label.className = "tooltip";
label.setAttribute("role", "status");
label.hidden = true;
document.body.append(label);
for (const title of document.querySelectorAll(".tip > title")) {
  title.parentNode.dataset.text = title.textContent;
  title.remove();
}
for (const kind of ["pointerover", "click"]) {
  document.addEventListener(kind, (event) => {
    const spot = event.target.closest(".tip");
    label.hidden = !spot;
    if (!spot) return;
    label.textContent = spot.dataset.text;
    const box = spot.getBoundingClientRect();
    const room = document.documentElement.clientWidth - label.offsetWidth - 8;
    label.style.left = Math.max(8, Math.min(box.left, room)) + "px";
    label.style.top = (box.top > label.offsetHeight + 8 ? box.top - label.offsetHeight - 6 : box.bottom + 6) + "px";
  });
}
