// The timeline: a lane for each part, a thin line while it works, and a bar for each outage.
import { fit, h, patch } from "./dom.js";
import { began, ended, lasted, model, now, outagesOf, stateOf } from "./wire.js";
import { address, BAD, clock, known, link, shape, STATE, took, toPart, zoned } from "./words.js";

const MOST_LANES = 12;
const HEAD = 34;
const RIGHT = 14;
const TICKS = { 120: [15, 40], 900: [120, 300], 3600: [600, 1200] };

export const SPANS = [[120, "2 min"], [900, "15 min"], [3600, "1 h"]];
export const span = () => (SPANS.some(([each]) => String(each) === address().span) ? Number(address().span) : 900);

// The outage that the address names, by its time of day for people and by its number.
export function chosen() {
  const { at, outage } = address();
  const [same, alike] = [(each) => String(each.id) === outage, (each) => clock(each.sign_of_life) === at];
  return at && (model.outages.find(same) ?? model.outages.find(alike));
}
export function toOutage(outage) {
  const open = outage === chosen();
  return link({ at: open ? null : clock(outage.sign_of_life), outage: open ? null : outage.id });
}

// -- lanes

function lanesOf(only, from) {
  const watched = (id) => stateOf(id) !== "unknown" || model.lanes[id]?.some(([, state]) => state !== "unknown");
  const all = only ? [only] : model.state.map.lanes.map((each) => each.filter(watched)).filter((each) => each.length);
  const count = all.reduce((sum, each) => sum + each.length, 0);
  if (only || count <= MOST_LANES || "lanes" in address()) return { rows: all, more: 0 };
  const touched = new Set(model.outages.filter((each) => ended(each) > from).flatMap((each) => [each.root, ...Object.keys(each.parts)]));
  const rows = all.map((group) => group.filter((id) => touched.has(id) || BAD.has(stateOf(id)))).filter((each) => each.length);
  return { rows, more: count - rows.reduce((sum, each) => sum + each.length, 0) };
}

// -- bars

export function tipOf(outage, id) {
  const open = outage.ended === null;
  const late = outage.noticed - outage.sign_of_life;
  return [
    `${outage.id} · ${outage.what}`,
    `${clock(outage.sign_of_life)}, ${open ? `for ${took(lasted(outage))} so far` : took(outage.lasted)}${late > 1 ? `, noticed after ${took(late)}` : ""}`,
    id && id !== outage.root ? `${id} waited for ${outage.root}` : "",
    outage.why,
    outage.cost_words && `Cost: ${outage.cost_words}`,
  ].filter(Boolean).join("\n");
}

function bar(from, to, state, { at, end, y, key, tip, noticed }) {
  const x = Math.min(at(from), at(end) - 6);
  const wide = Math.max(6, at(to) - x);
  const silent = noticed ? at(noticed) - x : 0;
  return h("g", { key, class: `outage ${known(state)}${to >= end ? " open" : ""}`, "data-tip": tip },
    h("rect.b", { x, y: y - 8, width: wide, height: 16, rx: 3 }),
    silent > 3 && silent < wide && h("rect.silent", { x: x + 1, y: y - 7, width: silent, height: 14 }));
}

// What a part did that belongs to no outage: it was starting, standing by, or asleep.
function plainBars(id, from, to, place) {
  const lane = model.lanes[id] ?? [];
  return lane.map(([t, state, incident], index) => {
    const end = lane[index + 1]?.[0] ?? to;
    if (incident || state === "works" || state === "unknown" || end < from || t > to) return null;
    if (BAD.has(state) && outagesOf(id).some((each) => each.sign_of_life < end && ended(each) > t)) return null;
    return bar(Math.max(t, from), end, state, { ...place, key: `${id} ${t}`, tip: `${id} ${STATE[known(state)][1]}\n${clock(t)}, ${took(end - t)}` });
  });
}

function outageBars(id, from, to, place) {
  return model.outages.flatMap((outage) => (outage.parts[id] ?? []).map(([begin, end, state]) => {
    const until = end ?? to;
    if (until < from || begin > to) return null;
    const noticed = id === outage.root ? outage.noticed : 0;
    return bar(Math.max(begin, from), until, state, { ...place, noticed, key: `${id} outage ${outage.id} ${begin}`, tip: tipOf(outage, id) });
  }));
}

// -- pins

// The places of the pins, pushed aside where they would touch; the oldest go if there is no room.
function pinned(outages, at, low, high) {
  const fits = outages.slice(-Math.max(1, Math.floor((high - low) / 21)));
  const places = fits.map((each) => (at(Math.max(began(each), 0)) + at(ended(each))) / 2);
  places.forEach((_, place) => (places[place] = Math.max(places[place], place ? places[place - 1] + 21 : low)));
  for (let place = places.length - 1; place >= 0; place -= 1) {
    places[place] = Math.min(places[place], place < places.length - 1 ? places[place + 1] - 21 : high);
  }
  return new Map(fits.map((each, place) => [each.id, places[place]]));
}

function incident(outage, x, at, from, height) {
  const [a, b] = [at(Math.max(from, began(outage))), at(ended(outage))];
  const mild = outage.state === "degraded";
  const open = outage.ended === null;
  const what = `Outage ${outage.id}: ${outage.what}, ${clock(outage.sign_of_life)}, ${open ? "still going on" : took(outage.lasted)}`;
  return h("a", { key: `outage ${outage.id}`, class: `incident${mild ? " degraded" : ""}${chosen() === outage ? " chosen" : ""}`, href: toOutage(outage), "aria-label": what, "data-tip": tipOf(outage) },
    h("rect.band", { x: a - 2, y: 25, width: Math.max(5, b - a + 4), height }),
    x !== undefined && [h("rect.hit", { x: x - 14, y: 0, width: 28, height: 28 }), h("circle.pin", { cx: x, cy: 14, r: 10 }), h("text", { x, y: 18.5 }, String(outage.id))]);
}

// -- the picture

const patterns = () => h("defs", { key: "defs" },
  h("pattern", { id: "hatch-down", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, h("rect.down-fill", { width: 6, height: 6 }), h("rect.cut-fill", { width: 2, height: 6 })),
  h("pattern", { id: "dots-degraded", width: 5, height: 5, patternUnits: "userSpaceOnUse" }, h("rect.degraded-soft", { width: 5, height: 5 }), h("circle.degraded-fill", { cx: 2.5, cy: 2.5, r: 1.3 })),
  h("pattern", { id: "hatch-none", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, h("rect.line-fill", { width: 1, height: 7 })));

function axis(t0, t1, at, bottom, phone) {
  const tick = TICKS[span()][phone ? 1 : 0];
  const found = [];
  for (let t = Math.ceil(zoned(t0) / tick) * tick - zoned(0); t < t1; t += tick) {
    const x = at(t);
    found.push(h("g.tick", { key: `tick ${t}` }, h("line", { x1: x, x2: x, y1: HEAD - 6, y2: bottom }), x < at(t1) - (span() < 300 ? 76 : 48) && h("text", { x, y: bottom + 15 }, span() < 300 ? clock(t) : clock(t).slice(0, 5))));
  }
  return found;
}

let focused = null; // of the lanes, one is a stop of the Tab key; the arrows go to the others
export const laneFocused = (id) => (focused = id);

function lane(id, y, { room, label, step, at, from, to, began: start, first }) {
  const state = known(stateOf(id));
  const bad = state !== "works";
  const place = { at, end: to, y };
  const stop = focused === null ? first === id : focused === id;
  return h("g", { key: `lane ${id}`, class: `lane${bad ? " bad" : ""}`, "data-lane": id },
    h("rect.hit", { x: 0, y: y - step / 2, width: room, height: step }),
    h("a", { href: toPart(id), tabindex: stop ? 0 : -1, "data-lane": id, "data-tip": `${id}\n${STATE[state][0]}`, "aria-label": `${id}: ${STATE[state][0]}` },
      h("rect.hit", { x: 0, y: y - step / 2, width: label - 4, height: step }),
      shape(state, `translate(9 ${y}) scale(.82)`),
      h("text", { x: 22, y: y + 4.5 }, fit(id, label - 30, bad ? "650 13px" : "400 13px", { name: true }))),
    h("line.ok", { x1: at(Math.max(from, start)), x2: at(to), y1: y, y2: y }),
    start > from + 1 && h("rect.before", { x: at(from), y: y - 7, width: Math.max(0, at(start) - at(from)), height: 14 }),
    plainBars(id, from, to, place),
    outageBars(id, from, to, place));
}

export function drawTimeline(host, room, only = null) {
  const seconds = span();
  const phone = room < 600;
  const to = now();
  const from = to - seconds;
  const { rows, more } = lanesOf(only, from);
  const step = phone ? 24 : 27;
  const label = phone ? 108 : Math.min(214, Math.max(128, room / 7));
  const at = (t) => Math.round((label + ((t - from) / seconds) * (room - label - RIGHT)) * 10) / 10;
  const names = rows.flat();
  const bottom = HEAD + names.length * step + Math.max(0, rows.length - 1) * 9 + (more || !names.length ? step : 0);
  const shown = model.outages.filter((each) => ended(each) > from && (!only || only.some((id) => id in each.parts))).reverse();
  const pins = pinned(shown, at, label, room - RIGHT);
  const start = model.state.began;
  const about = { room, label, step, at, from, to, began: start, first: names[0] };
  if (!names.includes(focused)) focused = null;
  let y = HEAD - step / 2 - 9;
  const lanes = rows.map((group) => {
    y += 9;
    return group.map((id) => lane(id, (y += step), about));
  });
  const hidden = `${more} ${names.length ? "other " : ""}part${more === 1 ? "" : "s"} without an outage`;
  const middle = (at(from) + at(start)) / 2;
  const half = HEAD + (bottom - HEAD) / 2;
  patch(host, h("svg.plot", { viewBox: `0 0 ${room} ${bottom + 20}`, height: bottom + 20, role: "group", "aria-label": "The states of each part over time", "data-arrows": "", "data-cross": `${from} ${seconds} ${label} ${RIGHT}` },
    patterns(),
    axis(from, to, at, bottom, phone),
    h("text.maplabel.end", { key: "now", x: room - RIGHT, y: bottom + 15 }, "now"),
    shown.map((each) => incident(each, pins.get(each.id), at, from, bottom - 25)),
    lanes,
    more > 0 && h("a.more", { key: "more", href: link({ lanes: "" }), "aria-label": `Show ${hidden}` },
      h("rect.hit", { x: 0, y: bottom - step, width: room, height: step }),
      shape("works", `translate(9 ${bottom - step / 2}) scale(.82)`),
      h("text", { x: 22, y: bottom - step / 2 + 4.5 }, hidden)),
    start > from + 60 && at(start) - at(from) > 200 && names.length > 1 && h("g", { key: "before" }, h("rect.plate", { x: middle - 96, y: half - 13, width: 192, height: 24, rx: 6 }), h("text.maplabel.middle", { x: middle, y: half + 4 }, "before this process started")),
    h("line.nowline", { key: "line", x1: at(to), x2: at(to), y1: HEAD - 6, y2: bottom }),
    h("line.cross", { key: "cross", y1: HEAD - 6, y2: bottom, visibility: "hidden" })));
}

export const spanLinks = () => h("div.spans", { role: "group", "aria-label": "Span of timeline and numbers" }, SPANS.map(([seconds, text]) => h("a.button", { href: link({ span: seconds === 900 ? null : seconds }), "aria-current": span() === seconds ? "true" : null }, text)));
