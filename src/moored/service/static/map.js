// The map: who listens, the parts of this process, and their servers, with what flows between them.
import { fit, h, patch, width } from "./dom.js";
import { factOf, lastOf, model, stateOf } from "./wire.js";
import { BAD, known, measured, shape, STATE, toPart } from "./words.js";

const [FACT, BOLD] = ["400 12.5px", "600 12.5px"];
const SPARK = 46;

const nodeOf = (id) => model.state.map.nodes.find((each) => each.id === id);
const isServer = (node) => node.role !== "part";

// -- where everything is

// Columns from left to right, the servers last.
function across({ nodes, layers, rows }, room) {
  const tall = room > 1500;
  const high = tall ? 64 : 56;
  const pitch = high + (tall ? 28 : 17);
  const gap = room > 1100 ? 84 : room > 900 ? 70 : 36;
  const wide = Math.max(124, Math.min(room > 1300 ? 264 : 248, (room - 32) / layers - gap));
  const step = layers > 1 ? (room - 32 - wide) / (layers - 1) : 0;
  const at = (layer, place) => ({ x: 16 + layer * step, y: 30 + place * pitch, w: wide, h: high, layer });
  const boxes = new Map(nodes.map((each) => [each.id, at(each.layer, each.place)]));
  return { boxes, at, height: 30 + rows * pitch, turned: false, roomy: step - wide > 62 };
}

// Rows from top to bottom, the servers last; a layer that is too wide takes several rows.
function down({ nodes, layers }, room) {
  const high = 50;
  const most = Math.max(1, Math.floor((room + 8) / 86));
  const boxes = new Map();
  let y = 6;
  for (let layer = 0; layer < layers; layer += 1) {
    const all = nodes.filter((each) => each.layer === layer).sort((a, b) => a.place - b.place);
    const rows = Math.ceil(all.length / most);
    const each = Math.ceil(all.length / Math.max(1, rows));
    for (let row = 0; row < rows; row += 1) {
      const here = all.slice(row * each, (row + 1) * each);
      const wide = Math.min(128, (room - 8 * (here.length - 1)) / here.length);
      here.forEach((node, place) => boxes.set(node.id, { x: ((place + 0.5) * room) / here.length - wide / 2, y, w: wide, h: high, layer }));
      y += high + (row + 1 < rows ? 8 : 40);
    }
  }
  return { boxes, height: y - 34, turned: true, roomy: false };
}

// -- edges

// Only the edge to a server that is lost is red; what hangs on it waits; bystanders stay as they are.
function flowOf(edge) {
  const [user, needed] = [nodeOf(edge.from), nodeOf(edge.to)].sort((a, b) => a.layer - b.layer);
  const [mine, its] = [stateOf(user.id), stateOf(needed.id)];
  if (isServer(needed) && (its === "down" || mine === "down")) return "down";
  if (its === "down" || its === "waits") return "waits";
  return its === "starting" || mine === "starting" ? "starting" : "works";
}

const curve = (t, a, b) => (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * a + 3 * (1 - t) * t * t * b + t ** 3 * b;

// The path of an edge, places for its label.
function route(edge, { boxes, at, turned }) {
  const [a, b] = [boxes.get(edge.from), boxes.get(edge.to)];
  if (turned) {
    const up = a.y > b.y;
    const [x1, y1, x2, y2] = [a.x + a.w / 2, up ? a.y : a.y + a.h, b.x + b.w / 2, up ? b.y + b.h : b.y];
    const bend = (y2 - y1) / 2;
    return { d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`, spots: [0.5, 0.35, 0.65, 0.25].map((t) => [curve(t, x1, x2), curve(t, y1, y2)]) };
  }
  const left = a.x > b.x;
  let [x, y] = [left ? a.x : a.x + a.w, a.y + a.h / 2];
  let d = `M${x} ${y}`;
  const spots = [];
  const bow = (x2, y2, ...where) => {
    const bend = (x2 - x) / 2;
    d += `C${x + bend} ${y} ${x2 - bend} ${y2} ${x2} ${y2}`;
    for (const t of where) spots.push([(1 - t) ** 3 * x + 3 * (1 - t) ** 2 * t * (x + bend) + 3 * (1 - t) * t * t * (x2 - bend) + t ** 3 * x2, curve(t, y, y2)]);
    [x, y] = [x2, y2];
  };
  for (const [layer, place] of edge.via ?? []) {
    const slot = at(layer, place);
    const [near, far] = left ? [slot.x + slot.w, slot.x] : [slot.x, slot.x + slot.w];
    bow(near, slot.y + slot.h / 2);
    spots.push([slot.x + slot.w / 2, slot.y + slot.h / 2]);
    d += `L${far} ${y}`;
    x = far;
  }
  bow(left ? b.x + b.w : b.x, b.y + b.h / 2, 0.5, 0.34, 0.66, 0.42, 0.58, 0.26, 0.74);
  return { d, spots };
}

function labelOf(edge, flow) {
  if (flow === "down") return "✕ nothing";
  if (flow === "waits") return "waits";
  if (flow === "starting") return "";
  const value = edge.flow ? lastOf(edge.flow) : undefined;
  return Number.isFinite(value) ? measured(value, edge.unit) : "";
}

// The first place of each label where it covers no other one.
function placed(labels) {
  const taken = [];
  return labels.map(({ text, spots, ...rest }) => {
    const half = width(text, FACT) / 2 + 3;
    const free = ([x, y]) => taken.every((each) => Math.abs(each.y - y) > 14 || Math.abs(each.x - x) > each.half + half);
    const [x, y] = spots.find(free) ?? spots[0];
    taken.push({ x, y, half });
    return { text, x, y, ...rest };
  });
}

// -- nodes

function spark(name, x, y, high) {
  const all = model.recent?.values[name]?.slice(-150).map((each) => (Number.isFinite(each) ? each : 0)) ?? [];
  if (all.length < 5) return null;
  const top = Math.max(...all, 1e-9) * 1.08;
  const per = all.length / SPARK;
  const points = Array.from({ length: SPARK }, (_, place) => {
    const some = all.slice(Math.floor(place * per), Math.max(Math.floor(place * per) + 1, Math.floor((place + 1) * per)));
    return `${x + place} ${Math.round((y + high - (some.reduce((sum, each) => sum + each, 0) / some.length / top) * high) * 10) / 10}`;
  });
  const line = points.join("L");
  return h("g", { key: "spark" }, h("path.area", { d: `M${x} ${y + high}L${line}L${x + SPARK - 1} ${y + high}Z` }), h("path.spark", { d: `M${line}` }));
}

function drawNode(node, { boxes, turned }) {
  const { x, y, w, h: high } = boxes.get(node.id);
  const state = known(stateOf(node.id));
  const fact = factOf(node.id);
  const sparks = !turned && node.main && state === "works" && w > 165 ? SPARK + 10 : 0;
  // Where it is narrow, the fact begins below the glyph; where it is tiny, the glyph is beside the fact.
  const [tiny, small] = [w < 100, w < 165];
  const size = turned ? 12 : small ? 13 : 14;
  const left = tiny ? 8 : small ? 28 : 34;
  const below = tiny ? 24 : small ? 10 : 34;
  const short = turned && !["works", "unknown"].includes(state) ? STATE[state][0].split(" ")[0] : fact || node.kind;
  const box = (by) => h("rect.box", { x: by, y: -by, width: w, height: high, rx: 10 });
  const kids = [
    node.stack && [box(8), box(4)],
    box(0),
    sparks > 0 && spark(node.main, w - SPARK - 10, high / 2 - 15, 30),
    shape(state, small ? `translate(${tiny ? 14 : 16} ${high / 2 + (tiny ? 9.5 : -9)}) scale(.75)` : `translate(19 ${high / 2 - 10}) scale(.95)`),
    h("text", { class: `name size${size}`, x: left, y: high / 2 - 5 }, fit(node.name, w - left - 6 - sparks, `640 ${size}px`, { name: true })),
    h("text.fact", { x: below, y: high / 2 + 14 }, fit(short, w - below - 6 - sparks, BAD.has(state) ? BOLD : FACT)),
  ];
  const about = {
    key: node.id,
    class: `node ${state} ${node.role}`,
    transform: `translate(${x} ${y})`,
    "aria-label": `${node.name}, ${node.kind}: ${STATE[state][0]}${fact && fact !== STATE[state][0] ? `, ${fact}` : ""}`,
    "data-tip": `${node.name} · ${node.kind}\n${STATE[state][0]}${fact ? `: ${fact}` : ""}${node.runs ? `\n${node.runs}` : ""}`,
  };
  return node.role === "outside" ? h("g", { ...about, role: "img" }, kids) : h("a", { ...about, href: toPart(node.id) }, kids);
}

// -- the picture

function frame(nodes, { boxes, height, turned }) {
  if (turned) return null;
  const own = nodes.filter((each) => each.role === "part").map((each) => boxes.get(each.id));
  if (!own.length) return null;
  const [left, right] = [Math.min(...own.map((each) => each.x)) - 16, Math.max(...own.map((each) => each.x + each.w)) + 16];
  const title = (x, text) => h("text.maplabel", { x, y: 18 }, text);
  const first = (role, side) => nodes.filter((each) => each.role === role).map((each) => boxes.get(each.id).x).filter(side);
  const servers = nodes.filter(isServer).map((each) => boxes.get(each.id).x).filter((x) => x > right);
  return h("g", { key: "frame" },
    h("rect.process", { x: left, y: 1, width: right - left, height: height - 2, rx: 14 }),
    title(left + 14, "this process"),
    servers.length && title(Math.min(...servers), "servers"),
    first("outside", (x) => x < left).length && title(16, "who listens"));
}

const arrow = (name) => h("marker", { id: `tip-${name}`, class: name, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse", markerUnits: "userSpaceOnUse" }, h("path", { d: "M0 .6 7.6 4 0 7.4Z" }));

export function drawMap(host, room) {
  const { map } = model.state;
  const place = (room - 32) / Math.max(1, map.layers) < 150 ? down(map, room) : across(map, room);
  const edges = map.edges.filter((each) => place.boxes.has(each.from) && place.boxes.has(each.to));
  const lines = [];
  const labels = [];
  for (const edge of edges) {
    const flow = flowOf(edge);
    const { d, spots } = route(edge, place);
    const text = labelOf(edge, flow);
    const key = `${edge.from}>${edge.to}`;
    lines.push(h("path", { key, class: `line ${flow}`, d, "marker-end": `url(#tip-${flow})` }));
    if (text && (place.roomy || flow === "down")) labels.push({ key, text: place.roomy ? text : "✕", flow, spots });
  }
  patch(host, h("svg.plot", { viewBox: `0 0 ${room} ${place.height}`, height: place.height, role: "group", "aria-label": "Map of the parts and servers", "data-arrows": "" },
    h("defs", ["works", "waits", "down", "starting"].map(arrow)),
    frame(map.nodes, place),
    h("g.edges", { "aria-hidden": "true" }, lines, placed(labels).map(({ key, text, flow, x, y }) => h("text", { key: `${key} label`, class: `label ${flow}`, x, y: y + 4 }, text))),
    map.nodes.map((each) => drawNode(each, place))));
}

// The members of a stack.
export const membersOf = (id) => nodeOf(id)?.stack ?? null;
