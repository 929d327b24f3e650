// How each kind of system is shown in its card: gauges, facts, state machines, and numbers over time.
"use strict";

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text; // never HTML: names and causes may contain any text
  return element;
}

// Allow line breaks in a path after each slash.
function breakable(element, path) {
  path.split("/").forEach((part, place) => {
    if (place) element.append("/", document.createElement("wbr"));
    element.append(part);
  });
  return element;
}

// At most three lines; the whole text as a tooltip.
function short(text) {
  const element = breakable(make("p", "detail short"), text);
  element.title = text;
  return element;
}

function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
  const days = Math.floor(whole / 86400);
  return `${days} day${days === 1 ? "" : "s"} ${Math.floor((whole % 86400) / 3600)} h`;
}

const clockTime = (wall) => new Date(wall * 1000).toLocaleTimeString([], { hour12: false });

const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// The names begin with a plural: "callers waited".
const costText = (cost) => Object.entries(cost).map(([name, number]) => `${number} ${number === 1 ? name.replace(/s\b/, "") : name}`).join(", ");

function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (number >= 1024 && place < units.length - 1) {
    number /= 1024;
    place += 1;
  }
  return `${place ? number.toFixed(1) : number} ${units[place]}`;
}

function fact(name, text, word) {
  const item = make("li");
  const row = make("div", "row");
  row.append(make("span", "name", name));
  if (word) row.append(make("span", `badge ${word}`, word));
  row.append(make("span", "detail", text));
  item.append(row);
  return item;
}

// -- numbers over time: kept in the page, since it was opened ---------------------------------------

const KEPT = 60;
const SVG = "http://www.w3.org/2000/svg";
const histories = new Map();

function drawn(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// A line of the last values. A counter is shown as its rate per second, or per minute.
function overTime(place, name, value, { counter = false, per = "s", show = (number) => String(number) } = {}) {
  const key = `${place} ${name}`;
  const past = histories.get(key) || { points: [], last: null };
  const now = performance.now() / 1000;
  if (counter && past.last && now > past.last.at) {
    past.points.push((Math.max(0, value - past.last.value) / (now - past.last.at)) * (per === "min" ? 60 : 1));
  } else if (!counter) {
    past.points.push(value);
  }
  past.points = past.points.slice(-KEPT);
  past.last = { at: now, value };
  histories.set(key, past);
  const newest = past.points.length ? past.points[past.points.length - 1] : 0;
  const text = counter ? `${per === "min" ? Math.round(newest) : newest.toFixed(1)}/${per}` : show(newest);
  const item = make("li", "line");
  const top = Math.max(...past.points, 1e-9);
  const line = past.points.map((each, at) => `${100 - ((past.points.length - 1 - at) / (KEPT - 1)) * 100},${19 - (each / top) * 18}`).join(" ");
  const picture = drawn("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${text}` });
  picture.append(drawn("polyline", { points: line }));
  item.append(make("span", "name", name), picture, make("span", "detail", text));
  return item;
}

// -- gauges ----------------------------------------------------------------------------------------

function progress(label, done, all, text) {
  const item = make("li", "gauge");
  const bar = make("progress", "progress");
  bar.value = done;
  bar.max = Math.max(all, 1);
  bar.setAttribute("aria-label", label);
  item.append(make("span", "name", label), bar, make("span", "detail", `${done} of about ${all}, ${text}`));
  return item;
}

function gauge(label, used, ready, most, text = `${used} in use, ${ready} ready, of ${most}`) {
  const item = make("li", "gauge");
  const bar = make("div", "meter");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", label);
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", String(most));
  bar.setAttribute("aria-valuenow", String(used));
  for (const [kind, number] of [["used", used], ["free", ready]]) {
    const part = make("span", kind);
    part.style.flexGrow = String(number);
    bar.append(part);
  }
  const rest = make("span");
  rest.style.flexGrow = String(Math.max(0, most - used - ready));
  bar.append(rest);
  item.append(bar, make("span", "detail", text));
  return item;
}

const total = (counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);

function pool(place, it) {
  return [
    gauge(`${place}: connections`, it.in_use, it.size, it.max_size),
    overTime(place, "in use", it.in_use),
    overTime(place, "waiting", it.waiting),
    overTime(place, "births", it.refills, { counter: true }),
    overTime(place, "deaths", total(it.discards), { counter: true }),
    overTime(place, "refused", it.refused + it.timeouts, { counter: true }),
    fact("budget", `${Math.floor(it.rate_tokens_left)} connects allowed now, ${it.leases_held} leases held`),
  ];
}

// -- a state machine, with the current step lit ----------------------------------------------------

function machine(it) {
  const item = make("li", "machine");
  const row = make("div", "row");
  row.append(make("span", "name", it.name), make("span", "badge", it.doing), timeSince(it.for));
  item.append(row);
  const phases = make("ol", "phases");
  const current = it.step === it.phase ? it.phase : `${it.phase}/${it.step}`; // a phase without steps is its own step
  for (const state of it.states) {
    const [phase, step] = state.split("/");
    let box = [...phases.children].find((each) => each.dataset.phase === phase);
    if (!box) {
      box = make("li", "phase");
      box.dataset.phase = phase;
      box.append(make("span", "phase-name", phase.replaceAll("_", " ")));
      phases.append(box);
    }
    const lit = state === current;
    const dot = make("span", lit ? "step lit" : "step");
    dot.title = (step || phase).replaceAll("_", " ");
    if (lit) dot.setAttribute("aria-current", "step");
    box.append(dot);
    if (lit) box.classList.add("lit");
  }
  item.append(phases);
  const last = it.history[it.history.length - 1];
  if (last) item.append(make("p", "detail", `because ${last.cause}`));
  return item;
}

// -- Postgres: lock, positions, slot, pools, consumers, listener, outbox ---------------------------

function manager(place, it) {
  const facts = [];
  if (it.fatal) facts.push(fact("failed", it.fatal));
  const conditions = Object.entries(it.conditions);
  const missing = conditions.filter(([, each]) => !each.met);
  facts.push(fact("conditions", `${conditions.length - missing.length} of ${conditions.length} met`));
  for (const [name, each] of missing) facts.push(fact(name.replaceAll("_", " "), each.detail || "", "missing"));
  const holder = it.lock.holder;
  if (holder) facts.push(fact("lock", `held by backend ${holder.pid} (${holder.application}, for ${duration(holder.age)})`));
  for (const each of it.slot_blockers) {
    facts.push(fact("slot", `waits for backend ${each.pid}, open for ${duration(each.age)}${each.query && ": " + each.query}`));
  }
  if (it.flushed) facts.push(fact("positions", `received ${it.received}, flushed ${it.flushed}, last seen ${it.last_seen}`));
  if (it.lag) facts.push(overTime(place, "lag", it.lag.bytes, { show: (number) => `${bytes(number)}, ${duration(it.lag.seconds)}` }));
  if (it.slot.retained !== null) facts.push(overTime(place, "retained WAL", it.slot.retained, { show: bytes }));
  facts.push(overTime(place, "transactions", it.transactions, { counter: true }));
  for (const [table, each] of Object.entries(it.copies)) {
    const left = each.seconds_left === null ? "" : `, ${duration(each.seconds_left)} left`;
    facts.push(progress(`copy of ${table}`, each.rows, Math.max(each.estimated, each.rows), `${Math.round(each.rate)} rows/s${left}`));
  }
  for (const [role, each] of Object.entries(it.pools)) {
    const numbers = `${each.connected} of ${each.max_size}, ${each.in_use} in use, ${each.waiting} waiting`;
    facts.push(fact(`${role} pool`, numbers, each.state));
  }
  for (const [name, each] of Object.entries(it.consumers)) {
    const acknowledged = each.acknowledged ? `acknowledged ${each.acknowledged}` : "nothing acknowledged yet";
    facts.push(fact(name, `consumer, ${acknowledged}, ${each.outstanding} outstanding`, each.attached ? "attached" : "detached"));
  }
  const stored = it.outbox && it.outbox.status;
  if (stored) {
    facts.push(fact("outbox", `${bytes(stored.bytes)}, ${stored.oldest === null ? "empty" : `oldest event ${duration(stored.oldest)} old`}`));
    for (const each of stored.consumers) facts.push(overTime(place, `${each.name} lag`, each.lag, { show: duration }));
  }
  if (it.listener) {
    const { up, channels, failure, canary_latency: latency } = it.listener;
    facts.push(fact("listener", up ? counted(channels.length, "channel") : failure || "not connected yet", up ? "ready" : "missing"));
    if (latency !== null) facts.push(overTime(place, "canary", latency, { show: (number) => `${(number * 1000).toFixed(1)} ms` }));
  }
  return facts;
}

function broker(place, it) {
  return [
    overTime(place, "subscribers", it.subscribers, { show: (number) => `${number} of ${counted(it.tenants, "tenant")}` }),
    overTime(place, "delivered", it.delivered, { counter: true }),
    overTime(place, "dropped", total(it.dropped), { counter: true }),
    fact("resets", `${total(it.resets)}, ${it.replayed} events replayed, buffers held at most ${it.buffer_high_water}`),
    ...Object.entries(it.largest_tenants).map(([tenant, streams]) => fact(tenant, counted(streams, "stream"))),
  ];
}

function sessions(place, it) {
  const online = it.states.online || 0;
  const all = total(it.states);
  const facts = [gauge(`${place}: sessions`, online, 0, all, `${online} online, of ${all}`)];
  for (const [state, number] of Object.entries(it.states)) {
    if (state !== "online") facts.push(fact(state.replace("/", ", "), counted(number, "session")));
  }
  for (const counts of Object.values(it.totals)) {
    for (const name of ["acked", "rejected", "not_sent", "unknown"]) {
      if (counts[name]) facts.push(overTime(place, name.replace("_", " "), counts[name], { counter: true, per: "min" }));
    }
  }
  return facts;
}

function channel(place, it) {
  return it.address ? [fact("connection", `to ${it.address}, generation ${it.generation}`, it.state)] : [];
}

// Everything else: plain numbers and texts, and what is in `counters` as rates.
function plain(place, it) {
  const facts = Object.entries(it)
    .filter(([, value]) => value !== null && typeof value !== "object")
    .map(([name, value]) => fact(name.replaceAll("_", " "), String(value)));
  const rates = Object.entries(it.counters || {}).map(([name, value]) => overTime(place, name, value, { counter: true }));
  return [...facts, ...rates];
}

const SYSTEMS = { pool, manager, broker, streams: broker, sessions, channel };

function system(place, kind, it) {
  if (it.error) return [fact("broken", it.error)];
  return (SYSTEMS[kind] || plain)(place, it);
}
