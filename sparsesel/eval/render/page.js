"use strict";
// Click on a heading: its better end first, then the other, then the order as it was. Rows stay within their group.
const last = (value) => value === null;
const key = (cell) => {
  const text = cell.dataset.value ?? cell.textContent.trim();
  if (text === "" || text === "–") return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
};
const compare = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === typeof b) return a.localeCompare(b, "en", { numeric: true });
  return typeof a === "number" ? -1 : 1;
};
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const bodies = [...table.tBodies].map((body) => [body, [...body.rows]]);
  headings.forEach((heading, column) => {
    const first = heading.dataset.first;
    const second = first === "ascending" ? "descending" : "ascending";
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const next = now === "none" ? first : now === first ? second : "none";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      for (const [body, rows] of bodies) {
        const keyed = rows.map((row) => [key(row.cells[column]), row]);
        if (next !== "none") {
          keyed.sort(([a], [b]) => (last(a) || last(b) ? last(a) - last(b) : sign * compare(a, b)));
        }
        body.append(...keyed.map(([, row]) => row));
      }
    });
  });
}
