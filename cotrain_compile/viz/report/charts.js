"use strict";

// The charts are drawn on canvas, which style sheets do not reach: their ink is set from the page's,
// and of the two colours that a model has as tags, for a light page and a dark one, one is taken.
const dark = matchMedia("(prefers-color-scheme: dark)");
const LIGHT_INK = "#5d6670";
const COLOURED = {LinearColorMapper: "palette", VAreaStep: "fill_color", Step: "line_color", Span: "line_color"};
function ink(isDark) {
  const style = getComputedStyle(document.documentElement);
  const text = isDark ? style.getPropertyValue("--quiet").trim() : LIGHT_INK;
  for (const model of Bokeh.documents.flatMap((doc) => [...doc._all_models.values()])) {
    if (model.type.endsWith("Axis")) {
      model.setv({
        axis_label_text_color: text, major_label_text_color: text, axis_line_color: text,
        major_tick_line_color: text, minor_tick_line_color: null,
      });
    } else if (model.type === "Grid") {
      model.grid_line_color = text;
    } else if (model.type in COLOURED && model.tags.length === 2) {
      model[COLOURED[model.type]] = model.tags[isDark ? 1 : 0];
    }
  }
}

dark.addEventListener("change", () => ink(dark.matches));
addEventListener("beforeprint", () => ink(false));
addEventListener("afterprint", () => ink(dark.matches));
const drawn = setInterval(() => {
  if (Bokeh.documents.length) {
    clearInterval(drawn);
    ink(dark.matches);
  }
}, 20);

// Bars by keyboard: the one that is chosen is told below its chart, and brought into view.
function barsOf(chart) {
  const shown = chart.renderers.filter((renderer) => renderer.visible && renderer.data_source.data.kind);
  return shown.length ? shown[0].data_source : null;
}
function choose(output, chart, key, chosen) {
  const source = barsOf(chart);
  if (source === null) return null;
  const {left, right, top, name, what, where, lasts} = source.data;
  const all = [...left.keys()].filter((i) => right[i] > left[i]);
  const lanes = [...new Set(all.map((i) => top[i]))].sort((a, b) => b - a);
  const began = chosen === null || chosen >= left.length;
  const now = began ? all.filter((i) => top[i] === lanes[0])[0] : chosen;
  const near = (lane) => all.filter((i) => top[i] === lane).reduce(
    (a, b) => (Math.abs(left[b] - left[now]) < Math.abs(left[a] - left[now]) ? b : a));
  let next = now;
  if (!began && (key === "ArrowLeft" || key === "ArrowRight")) {
    const own = all.filter((i) => top[i] === top[now]).sort((a, b) => left[a] - left[b]);
    next = own[own.indexOf(now) + (key === "ArrowRight" ? 1 : -1)] ?? now;
  } else if (!began) {
    const lane = lanes[lanes.indexOf(top[now]) + (key === "ArrowDown" ? 1 : -1)];
    next = lane === undefined ? now : near(lane);
  }
  source.selected.indices = [next];
  const range = chart.x_range, wide = range.end - range.start;
  if (left[next] < range.start || right[next] > range.end) {
    range.setv({start: left[next] - wide / 4, end: left[next] + (3 * wide) / 4});
  }
  const text = (column) => source.tags[column[next]];
  output.textContent = `${text(name)}: ${text(what)}; ${text(where)}; ${text(lasts)}`;
  return next;
}
for (const place of document.querySelectorAll(".chart.lanes")) {
  let chosen = null;
  place.addEventListener("keydown", (event) => {
    const chart = Bokeh.documents[0].get_model_by_name(place.dataset.chart);
    const range = chart.x_range, middle = (range.start + range.end) / 2, half = (range.end - range.start) / 2;
    const zoom = {"+": 0.5, "=": 0.5, "-": 2}[event.key];
    if (event.key.startsWith("Arrow")) {
      chosen = choose(place.querySelector("output"), chart, event.key, chosen);
    } else if (zoom !== undefined) {
      range.setv({start: Math.max(range.bounds[0], middle - half * zoom), end: Math.min(range.bounds[1], middle + half * zoom)});
    } else if (event.key === "0") {
      range.setv({start: 0, end: range.bounds[1] / 1.1 * 1.01});
    } else {
      return;
    }
    event.preventDefault();
  });
  place.addEventListener("blur", () => {
    const source = barsOf(Bokeh.documents[0].get_model_by_name(place.dataset.chart));
    if (source !== null) source.selected.indices = [];
  });
}

// A table that is wider than its place says so.
function hint() {
  for (const place of document.querySelectorAll(".wide")) {
    place.classList.toggle("scrolls", place.scrollWidth > place.clientWidth + 1);
  }
}
addEventListener("resize", hint);
hint();
