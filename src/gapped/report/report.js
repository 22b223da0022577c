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
