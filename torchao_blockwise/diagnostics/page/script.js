"use strict";
// Data: {reports: [{step, ratio: {recipe: number}, layers: {..}}], last: [rows], recipes, trained, recommended, ..}; see
// writers.py.
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const color = (i) => `var(--c${i % 5})`;
const asNumber = (x) => (x === null ? NaN : Number(x));
const short = (x, digits = 1) => {
  const n = asNumber(x);
  if (Number.isNaN(n)) return "NaN";
  if (!Number.isFinite(n)) return n > 0 ? "∞" : "−∞";
  const text = n !== 0 && (Math.abs(n) < 0.001 || Math.abs(n) >= 1e6) ? n.toExponential(1) : n.toFixed(digits);
  return text.replaceAll("-", "−");
};
const powerOf2 = (e) => `2${[...String(e)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("")}`;
// A name of a layer that may be broken behind its dots.
const breakable = (name) => name.replaceAll(".", ".\u200b");

function node(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function legend(names, colors) {
  const entries = names.map((name, i) => node("span", {}, node("i", { style: `background:${colors[i]}` }), name));
  return node("div", { class: "legend" }, ...entries);
}

// Round values inside of [low, high], about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Number(t.toPrecision(9)));
  return found;
}

// Curves over steps. series: [{name, points: [[step, value]]}]; log: whether values are drawn by their logarithm.
function plotCurves(place, series, { log = false, limit = null, limitName = "" } = {}) {
  const width = Math.max(300, place.clientWidth), height = width < 500 ? 210 : 240;
  const left = 44, right = 14, top = 12, bottom = 26;
  const scaled = log ? Math.log10 : (v) => v;
  const usable = (v) => Number.isFinite(v) && (!log || v > 0);
  const points = series.flatMap((s) => s.points).filter(([, v]) => usable(v));
  if (!points.length) {
    place.replaceChildren(node("p", { class: "note" }, "Nothing to show."));
    return;
  }
  const values = [...points.map(([, v]) => scaled(v)), ...(limit === null ? [] : [scaled(limit)])];
  let low = Math.min(...values), high = Math.max(...values);
  const margin = Math.max((high - low) * 0.1, log ? 0.1 : 0.5);
  low -= margin; high += margin;
  const steps = points.map(([s]) => s), first = Math.min(...steps), last = Math.max(...steps, first + 1);
  const px = (s) => left + ((s - first) / (last - first)) * (width - left - right);
  const py = (v) => top + ((high - scaled(v)) / (high - low)) * (height - top - bottom);
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const marks = log
    ? ticks(Math.floor(low), Math.ceil(high), Math.min(6, Math.ceil(high) - Math.floor(low) || 1))
      .flatMap((t) => (Math.abs(high - low) < 2 ? [1, 2, 5] : [1]).map((m) => m * 10 ** t))
    : ticks(low, high, 5);
  for (const t of marks.filter((t) => scaled(t) >= low && scaled(t) <= high)) {
    svg.append(node("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }));
    svg.append(node("svg:text", { x: left - 8, y: py(t) + 4, "text-anchor": "end" }, String(t)));
  }
  for (const t of ticks(first, last, width < 500 ? 4 : 8).filter(Number.isInteger)) {
    svg.append(node("svg:text", { x: px(t), y: height - 8, "text-anchor": "middle" }, String(t)));
  }
  if (limit !== null) {
    svg.append(node("svg:line", { class: "limit", x1: left, x2: width - right, y1: py(limit), y2: py(limit) }));
    svg.append(node("svg:text", { class: "limit", x: width - right, y: py(limit) - 5, "text-anchor": "end" }, limitName));
  }
  const colors = series.map((s, i) => s.color ?? color(i));
  series.forEach((s, i) => {
    const drawn = s.points.filter(([, v]) => usable(v));
    const path = drawn.map(([x, v], k) => `${k ? "L" : "M"}${px(x).toFixed(1)} ${py(v).toFixed(1)}`).join("");
    svg.append(node("svg:path", { class: "curve", d: path, stroke: colors[i], "stroke-dasharray": s.dash ?? "none" }));
    for (const [x, v] of drawn) {
      const dot = node("svg:circle", { cx: px(x), cy: py(v), r: drawn.length > 40 ? 2 : 3, fill: colors[i] });
      dot.append(node("svg:title", {}, `${s.name}, step ${x}: ${short(v, 2)}`));
      svg.append(dot);
    }
  });
  place.replaceChildren(svg, legend(series.map((s) => s.name), colors));
}

// Blocks by log2 of their scale; series: [{name, bins: {e: blocks}}], one row each.
function plotScales(place, series) {
  const filled = series.filter((s) => Object.keys(s.bins).length);
  if (!filled.length) {
    place.replaceChildren(node("p", { class: "note" }, "No blocks."));
    return;
  }
  const all = filled.flatMap((s) => Object.keys(s.bins).map(Number));
  const first = Math.min(...all), last = Math.max(...all) + 1;
  const width = Math.max(300, place.clientWidth), row = 46, left = 104, right = 14, bottom = 22;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${row * filled.length + bottom}`, role: "img" });
  const px = (e) => left + ((e - first) / (last - first)) * (width - left - right);
  filled.forEach((s, i) => {
    const base = row * (i + 1) - 4, most = Math.max(...Object.values(s.bins));
    svg.append(node("svg:text", { x: left - 8, y: base - 12, "text-anchor": "end" }, s.name));
    svg.append(node("svg:line", { class: "grid", x1: left, x2: width - right, y1: base, y2: base }));
    for (const [e, blocks] of Object.entries(s.bins)) {
      const size = Math.max(1.5, (blocks / most) * (row - 12)), x = px(Number(e));
      const bar = node("svg:rect", { x: x + 0.5, y: base - size, width: Math.max(1, px(Number(e) + 1) - x - 1),
        height: size, fill: color(i), rx: 1 });
      bar.append(node("svg:title", {}, `${powerOf2(e)} to ${powerOf2(Number(e) + 1)}: ${blocks} blocks`));
      svg.append(bar);
    }
  });
  for (const t of ticks(first, last, width < 500 ? 4 : 7).filter(Number.isInteger)) {
    svg.append(node("svg:text", { x: px(t), y: row * filled.length + 16, "text-anchor": "middle" }, powerOf2(t)));
  }
  place.replaceChildren(svg);
}

// --- the page ---------------------------------------------------------------------------------------------------------

const state = { sort: "sqnr_db", up: true, layer: null, recipe: "" };
const rowsOf = (recipe) => data.last.filter((r) => (recipe === "" ? r.trains : r.recipe === recipe));
const trainedName = (layer) => data.trained[layer] ?? "high precision";

function showHead() {
  const converted = Object.keys(data.trained).length, last = data.reports.at(-1);
  byId("subtitle").textContent = `Step ${last.step} · ${data.layers.length} layers, ${converted} in low precision · `
    + `${data.reports.length} report${data.reports.length === 1 ? "" : "s"}`;
  const bad = data.first_nonfinite, few = data.recommended, verdict = byId("verdict");
  verdict.classList.add(bad ? "alarm" : few.length ? "attention" : "good");
  const words = bad ? `NaN or Inf first in ${bad[0]}, ${bad[1]}`
    : few.length ? `${few.length} layer${few.length === 1 ? "" : "s"} to keep in bf16`
    : converted ? "No layer stands out" : "No layer trains in low precision";
  const items = few.slice(0, 5).map((r) => node("li", {}, `${breakable(r.layer)}: ${r.reason}`));
  if (few.length > 5) items.push(node("li", {}, `and ${few.length - 5} more`));
  verdict.append(node("strong", {}, words), ...(items.length ? [node("ul", {}, ...items)] : []));
  const rows = converted ? rowsOf("") : data.last;
  const least = (key, sign) => [...rows].sort((a, b) => sign * (rank(a[key]) - rank(b[key])))[0];
  const name = (r) => (r ? `${breakable(r.layer)}, ${r.kind}${converted ? "" : ` if ${r.recipe}`}` : "");
  const worst = least("sqnr_db", 1), flushed = least("underflow", -1), clipped = least("saturated", -1);
  const ratio = converted ? last.ratio[""] : undefined;
  const tile = (value, what, where) => node("div", { class: "tile" }, node("span", {}, what), node("b", {}, value),
    node("span", {}, where));
  byId("tiles").append(
    tile(ratio === undefined ? "–" : short(ratio), "gradient / noise", "of all layers; more is better"),
    tile(`${short(worst?.sqnr_db)} dB`, "least SQNR", name(worst)),
    tile(`${short(flushed?.underflow)} %`, "most underflow", name(flushed)),
    tile(`${short(clipped?.saturated, 2)} %`, "most saturated", name(clipped)),
  );
}

// What sorts NaN before all numbers.
function rank(x) {
  const n = asNumber(x);
  return Number.isNaN(n) ? -Infinity : n;
}

function showRatio() {
  const names = [...data.recipes, ""].filter((r) => data.reports.some((report) => report.ratio[r] !== undefined));
  const series = names.map((r) => ({
    name: r === "" ? "as it trains" : `all layers in ${r}`,
    color: r === "" ? "var(--ink)" : color(data.recipes.indexOf(r)),
    // Where all layers train by one recipe, its curve lies below this one.
    dash: r === "" ? "7 5" : "none",
    points: data.reports.filter((p) => p.ratio[r] !== undefined).map((p) => [p.step, asNumber(p.ratio[r])]),
  }));
  plotCurves(byId("ratio"), series, { log: true, limit: Math.sqrt(3), limitName: "√3" });
}

function showWhatIf() {
  const place = byId("whatif"), width = Math.max(300, place.clientWidth), row = 22, isNarrow = width < 500;
  const longest = Math.max(...data.layers.map((l) => l.length));
  const left = Math.min(isNarrow ? width * 0.42 : width * 0.4, longest * 6.6 + 14), right = 20;
  const least = (layer, recipe) => Math.min(...data.last.filter((r) => r.layer === layer && r.recipe === recipe)
    .map((r) => asNumber(r.sqnr_db)));
  const all = data.layers.flatMap((l) => data.recipes.map((r) => least(l, r))).filter(Number.isFinite);
  const low = Math.floor(Math.min(...all, 10) / 5) * 5, high = Math.ceil(Math.max(...all, 20) / 5) * 5;
  const px = (v) => left + ((Math.min(Math.max(v, low), high) - low) / (high - low)) * (width - left - right);
  const height = row * data.layers.length;
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  data.layers.forEach((layer, i) => {
    const y = row * i + row / 2;
    const fits = Math.floor((left - 14) / 6.6);
    const label = layer.length > fits ? `…${layer.slice(layer.length - fits + 1)}` : layer;
    const group = node("svg:g", { class: layer === state.layer ? "hit chosen" : "hit", onclick: () => choose(layer) });
    group.append(node("svg:rect", { x: 0, y: row * i, width, height: row, rx: 4 }));
    group.append(node("svg:line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
    group.append(node("svg:text", { x: left - 10, y: y + 4, "text-anchor": "end" }, label));
    data.recipes.forEach((recipe, c) => {
      const value = least(layer, recipe);
      if (!Number.isFinite(value)) return;
      const trains = data.trained[layer] === recipe;
      const dot = node("svg:circle", { cx: px(value), cy: y, r: trains ? 5.5 : 4, stroke: color(c), "stroke-width": 2,
        fill: trains ? color(c) : "var(--card)" });
      dot.append(node("svg:title", {}, `${layer}, ${recipe}: ${short(value, 2)} dB${trains ? ", as it trains" : ""}`));
      group.append(dot);
    });
    svg.append(group);
  });
  // Above the rows, where it stays while they scroll.
  const axis = node("svg:svg", { viewBox: `0 0 ${width} 22`, role: "img" });
  for (const t of ticks(low, high, isNarrow ? 3 : 6)) {
    axis.append(node("svg:text", { x: px(t), y: 14, "text-anchor": "middle" }, `${t} dB`));
  }
  const marks = legend(data.recipes, data.recipes.map((_, i) => color(i)));
  marks.append(node("span", {}, "● as it trains  ○ what if"));
  byId("whatif-legend").replaceChildren(marks);
  byId("whatif-axis").replaceChildren(axis);
  place.replaceChildren(svg);
}

const COLUMNS = [
  ["layer", "layer", (r) => r.layer, true], ["kind", "tensor", (r) => r.kind, true],
  ["recipe", "recipe", (r) => r.recipe, true],
  ["sqnr_db", "SQNR dB", (r) => short(r.sqnr_db, 2)], ["cosine", "cosine", (r) => short(r.cosine, 5)],
  ["amax", "amax", (r) => asNumber(r.amax).toPrecision(3)], ["zeros", "zeros %", (r) => short(r.zeros, 2)],
  ["underflow", "underflow %", (r) => short(r.underflow, 2)], ["saturated", "saturated %", (r) => short(r.saturated, 2)],
  ["range", "scales, log2", (r) => (r.scale_log2 ? r.scale_log2.map((s) => short(s)).join(" … ") : "–")],
  ["to_noise", "gradient / noise", (r) => (r.to_noise === null ? "–" : short(r.to_noise))],
  ["nonfinite", "NaN, Inf", (r) => String(r.nonfinite)],
];
const isBad = (key, r) => (key === "nonfinite" && r.nonfinite > 0) || (key === "to_noise" && r.to_noise !== null
  && asNumber(r.to_noise) < Math.sqrt(3));
const keyOf = (key, r) => (key === "range" ? (r.scale_log2 ? r.scale_log2[1] - r.scale_log2[0] : -1) : r[key]);

function compare(a, b) {
  const column = COLUMNS.find(([key]) => key === state.sort), [x, y] = [keyOf(state.sort, a), keyOf(state.sort, b)];
  const order = column[3] ? String(x).localeCompare(String(y), undefined, { numeric: true }) : rank(x) - rank(y) || 0;
  return state.up ? order : -order;
}

function showTable() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = rowsOf(state.recipe).filter((r) => words.every((w) => `${r.layer} ${r.kind}`.toLowerCase().includes(w)));
  const head = COLUMNS.map(([key, title, , isText]) => {
    const mark = key === state.sort ? (state.up ? " ↑" : " ↓") : "";
    const sort = () => {
      state.up = state.sort === key ? !state.up : true;
      state.sort = key;
      showTable();
    };
    const order = key === state.sort ? (state.up ? "ascending" : "descending") : "none";
    return node("th", { class: isText ? "text" : "", "aria-sort": order }, node("button", { onclick: sort }, title + mark));
  });
  byId("table").tHead.replaceChildren(node("tr", {}, ...head));
  byId("table").tBodies[0].replaceChildren(...rows.sort(compare).map((r) => {
    const cells = COLUMNS.map(([key, , text, isText]) => node("td",
      { class: isText ? "text" : isBad(key, r) ? "bad" : "", ...(key === "layer" ? { title: r.layer } : {}) }, text(r)));
    return node("tr", { class: r.layer === state.layer ? "chosen" : "", tabindex: 0, onclick: () => choose(r.layer),
      onkeydown: (e) => { if (e.key === "Enter") choose(r.layer); } }, ...cells);
  }));
}

function showDetail() {
  const recipe = state.recipe || data.trained[state.layer] || data.recipes[0];
  byId("detail-title").textContent = `${state.layer}, ${recipe}`
    + (data.trained[state.layer] === recipe ? "" : ` (trains in ${trainedName(state.layer)})`);
  const series = data.kinds.map((kind) => ({ name: kind, points: data.reports
    .map((p) => [p.step, p.sqnr[state.layer]?.[recipe]?.[kind]]).filter(([, v]) => v !== undefined)
    .map(([s, v]) => [s, asNumber(v)]) })).filter((s) => s.points.length);
  plotCurves(byId("curves"), series);
  plotScales(byId("scales"), data.last.filter((r) => r.layer === state.layer && r.recipe === recipe)
    .map((r) => ({ name: r.kind, bins: r.histogram })));
}

function choose(layer) {
  state.layer = layer;
  showWhatIf();
  showTable();
  showDetail();
}

function showAll() {
  showRatio();
  choose(state.layer);
}

const choices = [...(Object.keys(data.trained).length ? [["", "as it trains"]] : []), ...data.recipes.map((r) => [r, r])];
state.recipe = choices[0]?.[0] ?? "";
byId("recipe").append(...choices.map(([value, name]) => node("option", { value }, name)));
byId("recipe").addEventListener("change", (e) => { state.recipe = e.target.value; showTable(); showDetail(); });
byId("filter").addEventListener("input", showTable);
state.layer = data.recommended[0]?.layer ?? [...rowsOf(state.recipe)].sort(compare)[0]?.layer ?? data.layers[0];
showHead();
showAll();
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(showAll, 100); });
