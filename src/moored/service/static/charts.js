// Charts of one line: the numbers of a part over the span of the timeline.
import { h, patch } from "./dom.js";
import { span } from "./timeline.js";
import { ended, lastOf, model, now, second } from "./wire.js";
import { amount, measured, toPart } from "./words.js";

const HIGH = 92;
const TOP = 15;
const BOTTOM = HIGH - 3;
const SHOWN = 8;

const numbers = () => (span() > 900 ? model.hour : model.recent);
const round = (value) => Math.round(value * 10) / 10;

export const drawn = (name) => name in model.series && !name.endsWith("_99");

export function isFlat(name) {
  const all = model.recent?.values[name]?.filter(Number.isFinite) ?? [];
  return all.every((each) => each === all[0]);
}

// The charts of the overview: the main number of each part, then others that move.
export function chosenSeries() {
  const names = Object.keys(model.series).filter(drawn);
  const parts = model.state.map.nodes.filter((each) => each.role === "part" && each.main in model.series);
  const mains = parts.sort((a, b) => b.layer - a.layer || a.place - b.place).map((each) => each.main);
  const moving = names.filter((each) => !mains.includes(each) && !isFlat(each));
  return [...mains.slice(0, SHOWN), ...moving].slice(0, SHOWN);
}

function value(name, at) {
  const { unit, limit } = model.series[name];
  const [number, word] = amount(at === undefined ? (lastOf(name) ?? NaN) : at, unit);
  return [number, " ", h("small", limit ? `of ${measured(limit, unit)}` : word)];
}

export function chart(name, { own = false } = {}) {
  const about = model.series[name];
  const [number, word] = amount(lastOf(name) ?? NaN, about.unit);
  const title = own ? about.title : `${about.part}: ${about.title}`;
  return h("figure.chart", { key: name },
    h("div.top",
      h("h3", own ? title : h("a", { href: toPart(about.part) }, title)),
      h("span.value", { "data-value": name }, value(name))),
    h("div.plate", { "data-plot": "chart", "data-series": name, role: "img", "aria-label": `${title}, over time, now ${number} ${word}` }),
    second(name) in model.series && h("p.quiet.small", "half of them, and dashed: 99 %"));
}

// A number that never changed is a row of text.
export const flatRow = (name) => [h("dt", { key: `${name} name` }, model.series[name].title), h("dd", { key: name }, measured(lastOf(name) ?? NaN, model.series[name].unit))];

function lines(times, values, x, y, from) {
  let line = "";
  let area = "";
  let begin = null;
  let last = null;
  for (let place = 0; place < times.length; place += 1) {
    const at = values[place];
    if (times[place] < from) continue;
    if (!Number.isFinite(at)) {
      if (begin !== null) area += `L${last} ${BOTTOM}Z`;
      begin = null;
      continue;
    }
    last = round(x(times[place]));
    const point = `${last} ${round(y(at))}`;
    if (begin === null) {
      line += `M${point}`;
      area += `M${last} ${BOTTOM}L${point}`;
      begin = last;
    } else {
      line += `L${point}`;
      area += `L${point}`;
    }
  }
  if (begin !== null) area += `L${last} ${BOTTOM}Z`;
  return [line, area];
}

export function drawChart(host, wide) {
  const seconds = span();
  const name = host.dataset.series;
  const { part, unit, limit, kind } = model.series[name];
  const { times = [], values = {}, most = {} } = numbers() ?? {};
  const to = now();
  const from = to - seconds;
  const mine = values[name] ?? [];
  const peaks = most[name] ?? values[second(name)] ?? mine;
  let peak = 0;
  for (let place = 0; place < times.length; place += 1) if (times[place] >= from && peaks[place] > peak) peak = peaks[place];
  const least = unit === "B" ? 1024 : unit === "s" ? 0.001 : unit === "" ? 2 : 0.5;
  const top = Math.max(peak, limit ?? 0, least) * 1.04;
  const x = (t) => Math.max(0, Math.min(wide, ((t - from) / seconds) * wide));
  const y = (each) => BOTTOM - (each / top) * (BOTTOM - TOP);
  const [line, area] = lines(times, most[name] ?? mine, x, y, from);
  const other = second(name) in values ? lines(times, (most[second(name)] ? most : values)[second(name)], x, y, from)[0] : null;
  const bands = model.outages.filter((each) => ended(each) > from && part in each.parts);
  const start = Math.max(from, model.state.began);
  patch(host, h("svg", { viewBox: `0 0 ${wide} ${HIGH}`, height: HIGH, "aria-hidden": "true", "data-cross": `${from} ${seconds} 0 0` },
    start > from + 1 && h("rect.before", { key: "before", x: 0, y: TOP, width: x(start), height: BOTTOM - TOP }),
    bands.map((each) => h("rect", { key: `outage ${each.id}`, class: `band ${each.state}`, x: x(each.sign_of_life) - 1, y: TOP - 3, width: Math.max(3, x(ended(each)) - x(each.sign_of_life)), height: BOTTOM - TOP + 3 })),
    h("path.axis", { key: "axis", d: `M0 ${BOTTOM}H${wide}` }),
    limit && h("path.limit", { key: "limit", d: `M0 ${round(y(limit))}H${wide}` }),
    kind === "gauge" && h("path.area", { key: "area", d: area }),
    h("path.line", { key: "line", d: line }),
    most[name] && h("path.line.least", { key: "least", d: lines(times, mine, x, y, from)[0] }),
    other && h("path.line.other", { key: "other", d: other }),
    h("text", { key: "most", x: 2, y: 10 }, `most ${measured(peak, unit)}`),
    h("line.cross", { key: "cross", y1: TOP - 3, y2: BOTTOM, visibility: "hidden" })));
}

// A line through all charts and the timeline at one time, and the values at it; null takes it away.
export function showCross(t) {
  for (const svg of document.querySelectorAll("svg[data-cross]")) {
    const [from, seconds, left, right] = svg.dataset.cross.split(" ").map(Number);
    const line = svg.querySelector(".cross");
    const x = left + ((t - from) / seconds) * (svg.clientWidth - left - right);
    for (const each of ["x1", "x2"]) line.setAttribute(each, x);
    line.setAttribute("visibility", t === null ? "hidden" : "visible");
  }
  const { times = [], values = {} } = numbers() ?? {};
  const place = t === null ? -1 : times.findIndex((each) => each >= t);
  for (const element of document.querySelectorAll("[data-value]")) {
    const name = element.dataset.value;
    patch(element, value(name, place < 0 ? undefined : values[name]?.[place]));
  }
}
