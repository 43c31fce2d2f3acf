const table = document.getElementById("parameters");
const body = table.tBodies[0];
const rows = [...body.rows];
const heads = rows.filter((row) => !row.dataset.of);
const members = new Map(heads.map((row) => [row.dataset.group, []]));
rows.filter((row) => row.dataset.of).forEach((row) => members.get(row.dataset.of).push(row));
const single = rows.filter((row) => !row.dataset.group);
const search = document.getElementById("search");
function isOpen(number) {
  return body.querySelector(`[data-group="${number}"] button`).getAttribute("aria-expanded") === "true";
}
function show() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of rows) {
    const holds = words.every((word) => row.textContent.toLowerCase().includes(word));
    if (row.dataset.group) row.hidden = words.length > 0;
    else if (row.dataset.of) row.hidden = words.length ? !holds : !isOpen(row.dataset.of);
    else row.hidden = !holds;
    found += row.dataset.group || !holds ? 0 : 1;
  }
  document.getElementById("found").textContent = `${found} of ${single.length}`;
  hint();
}
search.addEventListener("input", show);
for (const row of heads.filter((row) => row.dataset.group)) {
  row.querySelector("button").addEventListener("click", (event) => {
    const button = event.currentTarget;
    button.setAttribute("aria-expanded", button.getAttribute("aria-expanded") !== "true");
    show();
  });
}
// Rows by keyboard: one is in the tab order, the arrow keys go to the others.
if (rows.length) rows[0].tabIndex = 0;
body.addEventListener("keydown", (event) => {
  const row = event.target.closest("tr"), step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (step === undefined) return;
  const shown = [...body.rows].filter((other) => !other.hidden);
  const next = shown[shown.indexOf(row) + step];
  if (next !== undefined) {
    rows.forEach((other) => other.removeAttribute("tabindex"));
    next.tabIndex = 0;
    next.focus();
  }
  event.preventDefault();
});

function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}
const byNumberInName = new Intl.Collator("en", {numeric: true});
const headings = [...table.tHead.rows[0].cells];
headings.forEach((heading, column) => {
  heading.firstElementChild.addEventListener("click", () => {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    headings.forEach((other) => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    heads.sort((one, other) => {
      const [a, b] = [value(one, column), value(other, column)];
      const order = typeof a === "number" ? a - b : byNumberInName.compare(a, b);
      return up ? order : -order;
    });
    body.append(...heads.flatMap((row) => [row, ...(members.get(row.dataset.group) ?? [])]));
  });
});
