// What the page knows: history first, then the changes as they happen.
import { setZone } from "./words.js";

const RETRY_AFTER = 2000;
const KEPT = { 2: 452, 20: 182 };
const MOST = 500; // outages, and states of a part

export const model = {
  state: null, // of the stream's first event: name, version, began, answer, nodes, map, demo
  outages: [], // the newest first
  lanes: {},
  series: {}, // without their numbers: title, unit, kind, part, limit
  recent: null, // times and values at each 2 s
  hour: null, // the same at each 20 s, of the last hour; read when it is looked at
  at: 0, // when the service was last heard, by its own clock
  lostSince: null,
};

let offset = Date.now() / 1000 - performance.now() / 1000;
let stopped = null;
export const now = () => stopped ?? performance.now() / 1000 + offset;

// The share of callers that a latency stands for is at the end of its name: both are one chart.
export const second = (name) => (name.endsWith("_50") ? name.replace(/_50$/, "_99") : null);

export const stateOf = (id) => model.state?.nodes[id]?.state ?? "unknown";
export const factOf = (id) => model.state?.nodes[id]?.fact ?? "";
export const began = (outage) => outage.sign_of_life;
export const ended = (outage) => outage.ended ?? now();
export const lasted = (outage) => (outage.ended === null ? now() - outage.sign_of_life : outage.lasted);
export const outagesOf = (id) => model.outages.filter((each) => each.root === id || id in each.parts);

function floats(base64) {
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  return Array.from(new Float32Array(bytes.buffer));
}

async function read(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 401) location.reload(); // the session has expired: show the login form
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return answer.json();
}

export const readPart = (name) => read(`v1/parts/${name.split("/").map(encodeURIComponent).join("/")}`);

async function history(span, part = "") {
  const found = await read(`v1/history?span=${span}&part=${encodeURIComponent(part)}`);
  const numbers = { step: found.step, times: [], values: {}, most: {}, fold: {} };
  for (const [name, { values, most, ...about }] of Object.entries(found.series)) {
    model.series[name] = about;
    numbers.values[name] = floats(values);
    if (most) numbers.most[name] = floats(most);
  }
  const length = Math.max(0, ...Object.values(numbers.values).map((each) => each.length));
  numbers.times = Array.from({ length }, (_, place) => found.from + place * found.step);
  return [numbers, found];
}

// Read the last hour, once it is looked at.
let reading = false;
export async function readHour(changed) {
  if (model.hour || reading) return;
  reading = true;
  try {
    [model.hour] = await history(3600);
  } finally {
    reading = false;
  }
  changed();
}

// Read the numbers of a part in a stack: ticks have those of the map alone.
export async function readNumbers(part) {
  if (model.state.map.nodes.some((each) => each.id === part)) return;
  const [{ times, values }] = await history(900, part);
  const place = (t) => Math.round((t - times[0]) / 2);
  for (const name in values) model.recent.values[name] = model.recent.times.map((t) => values[name][place(t)] ?? NaN);
}

// Add the newest values; those of the hour are the least and the most of each 20 s.
function append(numbers, t) {
  const { times, values, most, step, fold } = numbers;
  const sent = new Set(model.state.map.nodes.map((each) => each.id));
  for (const name in values) {
    const value = (sent.has(model.series[name].part) ? lastOf(name) : null) ?? NaN;
    const [low, high] = fold[name] ?? [value, value];
    fold[name] = [value < low ? value : low, value > high ? value : high];
  }
  const last = times[times.length - 1] ?? t - step;
  if (t - last < step * 0.75) return;
  if (t - last > step * 2.5) push(last + step, () => [NaN, NaN]);
  push(t, (name) => fold[name]);
  numbers.fold = {};

  function push(at, of) {
    times.push(at);
    for (const name in values) {
      values[name].push(of(name)[0]);
      most[name]?.push(of(name)[1]);
    }
    for (const each of [times, ...Object.values(values), ...Object.values(most)]) each.splice(0, each.length - KEPT[step]);
  }
}

let latest = {};
export const lastOf = (name) => latest[name] ?? model.recent?.values[name]?.findLast(Number.isFinite);

function heard(t) {
  if (t) offset = t - performance.now() / 1000;
  stopped = model.lostSince = null;
  model.at = now();
}

function keep(outage) {
  model.outages = [outage, ...model.outages.filter((each) => each.id !== outage.id)].sort((a, b) => b.id - a.id).slice(0, MOST);
}

const onEvent = {
  answer: (answer) => (model.state.answer = answer),
  map(map) {
    model.state.map = map;
    Object.assign(model.series, map.series);
  },
  outage: keep,
  story: (story) => (model.state.demo = { ...model.state.demo, ...story }),
  tick({ t, series, nodes }) {
    heard(t);
    for (const name in series) latest[name] = series[name] ?? NaN; // a gap
    for (const name in nodes ?? {}) {
      const before = stateOf(name);
      model.state.nodes[name] = nodes[name];
      if (before !== nodes[name].state) model.lanes[name] = [...(model.lanes[name] ?? []).slice(-MOST), [t, nodes[name].state, null]];
    }
    for (const numbers of [model.recent, model.hour]) {
      if (!numbers || !series) continue;
      for (const name in series) numbers.values[name] ??= numbers.times.map(() => NaN);
      append(numbers, t);
    }
  },
};

async function begin(state, changed) {
  setZone(state.zone);
  try {
    const [[numbers, found], { outages }] = await Promise.all([history(900), read("v1/outages")]);
    Object.assign(model, { recent: numbers, hour: null, lanes: found.lanes, outages });
  } catch {
    // The page shows what it has; the next connection reads it again.
  }
  model.state = state;
  onEvent.map(state.map); // has new series, too
  latest = { ...state.series };
  state.outages.forEach(keep);
  heard(state.now);
  changed();
}

// Follow the service; `changed` is called after each change.
export function follow(changed) {
  const stream = new EventSource("v1/events");
  let ready = Promise.resolve();
  const on = (name, handle) => stream.addEventListener(name, (message) => {
    const data = JSON.parse(message.data);
    ready = ready.then(() => handle(data)).catch(console.error); // in order, also while the history is read
  });
  on("state", (state) => begin(state, changed));
  for (const [name, handle] of Object.entries(onEvent)) {
    on(name, (data) => {
      if (!model.state) return;
      handle(data);
      heard();
      changed();
    });
  }
  stream.addEventListener("error", () => {
    stopped ??= now();
    model.lostSince ??= performance.now();
    changed();
    // The browser connects again by itself, unless the answer was an error.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => again(changed), RETRY_AFTER);
  });
}

async function again(changed) {
  try {
    await read("v1/status");
  } catch {
    // not there yet
  }
  follow(changed);
}
