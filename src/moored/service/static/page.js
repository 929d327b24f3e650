// The live page: what the address says is drawn from what the service says.
import { chart, chosenSeries, drawChart, showCross } from "./charts.js";
import { h, patch } from "./dom.js";
import { drawer, press } from "./drawer.js";
import { drawMap } from "./map.js";
import { outageRows } from "./outages.js";
import { card, partPage } from "./part.js";
import { lost, sentence, speak } from "./sentence.js";
import { drawTimeline, laneFocused, span, spanLinks } from "./timeline.js";
import { follow, model, now, readHour, stateOf } from "./wire.js";
import { address, glyph, known, link, STATE, TITLE_MARK, took } from "./words.js";

const EVERY = 500; // at most two updates per second

const byId = (id) => document.getElementById(id);

// -- views

const legend = () => h("ul.legend", { "aria-label": "Legend" }, ["works", "degraded", "down", "waits"].map((each) => h("li", glyph(each, 13), STATE[each][0])));

function overview() {
  const series = chosenSeries();
  return [
    model.lostSince === null ? sentence() : lost(),
    card("Map", "map", legend(), h("div", { "data-plot": "map" })),
    card("Timeline", "time", spanLinks(), h("div", { "data-plot": "timeline" }), outageRows()),
    series.length > 0 && card("Numbers", "numbers", h("span.quiet.small", "the same span as the timeline; shaded: an outage of that part"), h("div.charts", series.map((each) => chart(each)))),
  ];
}

const PLOTS = {
  map: drawMap,
  timeline: drawTimeline,
  lanes: (host, room) => drawTimeline(host, room, JSON.parse(host.dataset.lanes)),
  chart: drawChart,
};

function bar() {
  const { state } = model;
  const { part } = address();
  const shown = model.lostSince !== null || !state ? "unknown" : known(part ? stateOf(part) : state.answer.state);
  const name = state?.name ?? "moored";
  const bad = state?.answer.node && state.answer.state !== "works" ? `: ${state.answer.node}` : "";
  const title = `${TITLE_MARK[shown] ?? "?"} ${name}${part ? ` · ${part}` : bad}`;
  if (document.title !== title) document.title = title;
  const icon = new URL(`icon-${{ waits: "degraded", standby: "works", asleep: "works" }[shown] ?? shown}.svg`, import.meta.url).href;
  if (byId("favicon").href !== icon) byId("favicon").href = icon;
  patch(byId("mark"), glyph(shown, 20));
  patch(byId("name"), name);
  patch(byId("crumb"), "words" in address() ? "/ words" : part ? `/ ${part}` : "");
  patch(byId("meta"), state && ["up ", h("span.count", { "data-since": state.began, "data-coarse": "" }), ` · Moored ${state.version}`]);
  byId("break").hidden = !state?.demo;
}

export function render() {
  drawn = performance.now();
  const { part, ...rest } = address();
  const open = "drawer" in rest && Boolean(model.state?.demo);
  const words = "words" in rest;
  bar();
  const main = byId("main");
  if (main.className !== (part ? "part" : "overview")) main.className = part ? "part" : "overview";
  document.body.classList.toggle("lost", model.lostSince !== null);
  byId("frame").classList.toggle("open", open);
  byId("words").hidden = !words;
  main.hidden = words;
  const away = model.lostSince === null ? [] : [lost()];
  if (model.state) patch(main, part ? [away, partPage(part, soon)] : overview());
  else patch(main, away);
  byId("break").setAttribute("aria-expanded", String(open));
  byId("break").href = link({ drawer: open ? null : "" });
  byId("drawer").hidden = !open;
  if (open) patch(byId("drawer"), drawer(innerWidth < 1100));
  if (!words && model.state) {
    for (const host of main.querySelectorAll("[data-plot]")) {
      if (!rooms.has(host)) sized([{ target: host }]);
      PLOTS[host.dataset.plot](host, rooms.get(host));
    }
  }
  if (span() > 900 && model.state) readHour(soon).catch(() => {});
  if (!explained?.isConnected) tip(null);
  count();
  speak(byId("spoken"));
}

// The widths of the plots, without asking for a layout at each update.
const rooms = new WeakMap();
const sizes = new ResizeObserver((entries) => sized(entries) && render());
function sized(entries) {
  let changed = false;
  for (const { target } of entries) {
    if (!rooms.has(target)) sizes.observe(target);
    const room = target.clientWidth;
    changed ||= rooms.get(target) !== room && room > 0;
    if (room) rooms.set(target, room);
  }
  return changed;
}

// Draw once for all changes, at most twice a second, and not in a hidden tab.
let drawn = -EVERY;
let planned = 0;
function soon() {
  if (planned) return;
  const wait = Math.max(0, drawn + EVERY - performance.now());
  planned = setTimeout(() => {
    planned = 0;
    document.hidden ? bar() : render();
  }, wait);
}

// Clocks that count on between two updates; without contact they stand still.
function count() {
  for (const each of document.querySelectorAll("[data-since]")) {
    const seconds = now() - Number(each.dataset.since);
    const text = "coarse" in each.dataset ? took(Math.floor(seconds)).replace(".0 s", " s") : took(seconds);
    if (each.textContent !== text) each.textContent = text;
  }
  for (const each of document.querySelectorAll("[data-lost]")) each.textContent = took(Math.floor(performance.now() / 1000 - Number(each.dataset.lost))).replace(".0 s", " s");
}

// -- what a reader does

let before = {};
function moved() {
  const to = address();
  tip(null);
  render();
  if ((before.part ?? "") !== (to.part ?? "") || "words" in before !== "words" in to) {
    scrollTo(0, 0);
    byId("words" in to ? "words" : "main").focus({ preventScroll: true });
  } else if ("drawer" in to && !("drawer" in before)) {
    byId("drawer-close")?.focus({ preventScroll: true });
    if (innerWidth < 1100) scrollTo(0, (document.querySelector(".map, .time")?.offsetTop ?? 62) - 62);
  } else if ("drawer" in before && !("drawer" in to)) {
    byId("break").focus({ preventScroll: true });
  }
  before = to;
}

async function copy(button) {
  await navigator.clipboard.writeText(button.dataset.copy);
  button.firstChild.data = "Copied";
  setTimeout(() => (button.firstChild.data = "Copy"), 1500);
}

const THEMES = ["system", "light", "dark"];
function theme(chosen) {
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem("theme", chosen);
  } catch {
    // a browser that stores nothing
  }
  byId("theme").setAttribute("aria-label", `Colours: ${chosen}. Change`);
  byId("theme").dataset.tip = `Colours: ${chosen}`;
}

addEventListener("click", (event) => {
  const on = event.target.closest("[data-copy], [data-fault], #theme");
  if (!on) return;
  if (on.dataset.copy) copy(on);
  else if (on.dataset.fault) press(on.dataset.fault, soon);
  else if (on.id === "theme") theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

// Arrow keys go to the next link in that direction, within the map and within the lanes.
function step(event) {
  const from = event.target.closest("[data-arrows] a");
  const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
  if (!from || !way) return;
  event.preventDefault();
  const middle = (each) => {
    const box = (each.querySelector(".hit") ?? each).getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const [x, y] = middle(from);
  let best = null;
  for (const each of from.closest("[data-arrows]").querySelectorAll("a")) {
    const [dx, dy] = [middle(each)[0] - x, middle(each)[1] - y];
    const [along, across] = [dx * way[0] + dy * way[1], Math.abs(dx * way[1] + dy * way[0])];
    if (each !== from && along > 1 && (!best || along + 2 * across < best.far)) best = { each, far: along + 2 * across };
  }
  best?.each.focus();
}

addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (!byId("tip").hidden) tip(null);
    else if ("drawer" in address()) location.hash = link({ drawer: null });
    else if (address().at) location.hash = link({ at: null, outage: null });
    else if (address().part || "words" in address()) location.hash = link({ part: null, words: null });
  }
  step(event);
});

// -- tooltips: text, with its first line in bold

let explained;
function tip(target, x, y) {
  const box = byId("tip");
  explained = target;
  box.hidden = !target;
  if (!target) return;
  const [first, ...others] = target.dataset.tip.split("\n");
  patch(box, h("b", first), others.map((each) => h("p", each)));
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, x + 14))}px`;
  box.style.top = `${y + height + 24 > innerHeight ? y - height - 12 : y + 16}px`;
}

addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch") return;
  tip(event.target.closest?.("[data-tip]"), event.clientX, event.clientY);
  const plot = event.target.closest?.("svg[data-cross]");
  if (!plot && !crossed) return;
  crossed = Boolean(plot);
  if (!plot) return showCross(null);
  const [from, seconds, left, right] = plot.dataset.cross.split(" ").map(Number);
  const box = plot.getBoundingClientRect();
  const part = (event.clientX - box.left - left) / (box.width - left - right);
  showCross(part >= 0 && part <= 1 ? from + part * seconds : null);
});
let crossed = false;

addEventListener("focusin", (event) => {
  const { lane } = event.target.dataset ?? {};
  if (lane) laneFocused(lane);
  const target = event.target.closest?.("[data-tip]");
  if (!target?.matches(":focus-visible")) return tip(null);
  const box = target.getBoundingClientRect();
  tip(target, box.left + Math.min(box.width, 200) / 2, box.bottom - 10);
});

// -- begin

before = address();
theme(document.documentElement.dataset.theme ?? "system");
addEventListener("hashchange", moved);
addEventListener("visibilitychange", soon);
setInterval(() => {
  if (document.hidden) return;
  if (model.lostSince === null && model.outages.some((each) => each.ended === null)) soon(); // its bars grow
  count();
}, EVERY);
follow(soon);
