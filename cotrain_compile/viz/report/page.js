"use strict";

// The charts are drawn on canvas, which style sheets do not reach: their ink is set from the page's.
const dark = matchMedia("(prefers-color-scheme: dark)");
function ink() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--quiet").trim();
  for (const model of Bokeh.documents.flatMap((doc) => [...doc._all_models.values()])) {
    if (model.type.endsWith("Axis")) {
      model.setv({
        axis_label_text_color: text, major_label_text_color: text, axis_line_color: text,
        major_tick_line_color: text, minor_tick_line_color: null,
      });
    } else if (model.type === "Grid") {
      model.grid_line_color = text;
    }
  }
}
dark.addEventListener("change", ink);
const drawn = setInterval(() => {
  if (Bokeh.documents.length) {
    clearInterval(drawn);
    ink();
  }
}, 20);

const table = document.getElementById("parameters");
const body = table.tBodies[0];
const rows = [...body.rows];
const search = document.getElementById("search");
search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/);
  let found = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    found += row.hidden ? 0 : 1;
  }
  document.getElementById("found").textContent = `${found} of ${rows.length}`;
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
    rows.sort((one, other) => {
      const [a, b] = [value(one, column), value(other, column)];
      const order = typeof a === "number" ? a - b : byNumberInName.compare(a, b);
      return up ? order : -order;
    });
    body.append(...rows);
  });
});
