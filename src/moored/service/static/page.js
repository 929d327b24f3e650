// The live page. It reads one stream of server-sent events, which begins with the whole state.
"use strict";

const MAX_EVENTS = 200;
const RETRY_AFTER = 2000;

const byId = (id) => document.getElementById(id);

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

function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
  const days = Math.floor(whole / 86400);
  return `${days} day${days === 1 ? "" : "s"} ${Math.floor((whole % 86400) / 3600)} h`;
}

// Durations are counted on between two states, from their value at arrival.
function timeSince(seconds, prefix = "for ") {
  const element = make("span", "time");
  element.dataset.began = String(performance.now() / 1000 - seconds);
  element.dataset.prefix = prefix;
  showTime(element);
  return element;
}

function showTime(element) {
  const seconds = performance.now() / 1000 - Number(element.dataset.began);
  const text = element.dataset.prefix + duration(seconds < 10 ? Math.floor(seconds) : seconds).replace(".0 s", " s");
  if (element.textContent !== text) element.textContent = text;
}

// The last shown value of each element, so that only changes are highlighted.
const shown = new Map();

function mark(element, place, value) {
  if (shown.has(place) && shown.get(place) !== value) element.classList.add("fresh");
  shown.set(place, value);
}

function condition([name, it]) {
  const item = make("li");
  const word = it.met ? "met" : "missing";
  const row = make("div", "row");
  row.append(make("span", "name", name), make("span", `badge ${word}`, word), timeSince(it.for));
  item.append(row);
  if (it.detail) item.append(make("p", "detail", it.detail));
  mark(item, `condition ${name}`, word);
  return item;
}

function machine(it) {
  const item = make("li");
  const row = make("div", "row");
  const at = it.doing;
  row.append(make("span", "name", it.name), make("span", "badge", at), timeSince(it.for));
  item.append(row);
  const last = it.history[it.history.length - 1];
  if (last) item.append(make("p", "detail", `because ${last.cause}`));
  mark(item, `machine ${it.name}`, at);
  return item;
}

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
  if (word) mark(item, `fact ${name}`, word);
  return item;
}

// The replication stream: the holder of the lock, positions, slot, pools, consumers.
function stream(it) {
  const facts = [];
  if (it.fatal) facts.push(fact("failed", it.fatal));
  const holder = it.lock.holder;
  if (holder) facts.push(fact("lock", `held by backend ${holder.pid} (${holder.application}, for ${duration(holder.age)})`));
  for (const each of it.slot_blockers) {
    facts.push(fact("slot", `waits for backend ${each.pid}, open for ${duration(each.age)}${each.query && ": " + each.query}`));
  }
  if (it.flushed) facts.push(fact("positions", `received ${it.received}, flushed ${it.flushed}, last seen ${it.last_seen}`));
  if (it.lag) facts.push(fact("lag", `${bytes(it.lag.bytes)}, ${duration(it.lag.seconds)}`));
  if (it.slot.retained !== null) facts.push(fact("slot", `${it.slot.name} keeps ${bytes(it.slot.retained)} of log`));
  for (const [role, pool] of Object.entries(it.pools)) {
    const numbers = `${pool.connected} of ${pool.max_size}, ${pool.in_use} in use, ${pool.waiting} waiting`;
    facts.push(fact(`${role} pool`, numbers, pool.state));
  }
  for (const [name, each] of Object.entries(it.consumers)) {
    const where = each.attached ? "here" : "away";
    facts.push(fact(name, `consumer, ${where}, at ${each.acknowledged || "its beginning"}, ${each.outstanding} outstanding`));
  }
  return facts;
}

function node(it, above) {
  const path = above ? `${above}/${it.name}` : it.name;
  const item = make("li");
  item.dataset.path = path;
  const row = make("div", "row");
  row.append(make("span", "name", it.name), make("span", `badge ${it.state}`, it.state));
  for (const tag of [it.strategy, it.restart]) if (tag) row.append(make("span", "tag", tag));
  const times = it.restarts === 1 ? "once" : `${it.restarts} times`;
  if (it.restarts) row.append(make("span", "tag again", `restarted ${times}`));
  row.append(timeSince(it.since));
  item.append(row);
  if (it.last_failure) item.append(make("p", "detail", `last failure: ${it.last_failure}`));
  mark(row, `node ${path}`, `${it.state} ${it.generation}`);
  if (it.children.length) {
    const below = make("ul");
    below.append(...it.children.map((child) => node(child, path)));
    item.append(below);
  }
  return item;
}

function eventRow(it) {
  const bad = it.kind === "failure" || it.kind === "abandoned";
  const row = make("tr", bad ? "failure-row" : "");
  row.dataset.id = it.id;
  const when = make("td", "time", new Date(it.wall * 1000).toLocaleTimeString([], { hour12: false }));
  when.title = new Date(it.wall * 1000).toISOString();
  const what = make("td");
  what.append(make("span", "", it.text));
  for (const cause of it.because) what.append(make("div", "detail", `because ${cause}`));
  row.append(when, breakable(make("td", "name"), it.component), what);
  return row;
}

let newest = 0;

function addEvent(it) {
  if (it.id <= newest) return;
  newest = it.id;
  const rows = byId("events");
  rows.prepend(eventRow(it));
  while (rows.rows.length > MAX_EVENTS) rows.deleteRow(-1);
}

function showStatus(word) {
  const pill = byId("status");
  if (pill.textContent === word) return;
  pill.textContent = word;
  pill.className = `pill ${word}`;
  document.title = word === "active" ? "moored" : `${word} · moored`;
}

let process = null;

function showState(state) {
  if (process !== state.started_at) {
    // Another process than before: its events are numbered from 1 again.
    process = state.started_at;
    newest = 0;
    shown.clear();
    byId("events").replaceChildren();
  }
  showStatus(state.status);
  byId("about").replaceChildren(`${state.version} · pid ${state.pid} · `, timeSince(state.uptime, "up "));
  byId("conditions").replaceChildren(...Object.entries(state.conditions).map(condition));
  byId("tree").replaceChildren(node(state.tree, ""));
  byId("machines").replaceChildren(...state.machines.map(machine));
  byId("machines-section").hidden = state.machines.length === 0;
  byId("stream-section").hidden = !state.postgres;
  if (state.postgres && state.postgres.error) {
    byId("stream").replaceChildren(fact("broken", state.postgres.error));
  } else if (state.postgres) {
    byId("stream-id").textContent = state.postgres.stream_id;
    byId("stream").replaceChildren(...stream(state.postgres));
  }
  state.events.forEach(addEvent);
}

function showLost(lost) {
  const notice = byId("lost");
  if (lost === !notice.hidden) return;
  document.body.classList.toggle("is-lost", lost);
  notice.hidden = !lost;
  if (lost) {
    showStatus("disconnected");
    const at = new Date().toLocaleTimeString([], { hour12: false });
    notice.textContent = `The service has not responded since ${at}. This page shows the last known state, and reconnects automatically.`;
  }
}

function connect() {
  const stream = new EventSource("v1/events");
  stream.addEventListener("state", (message) => {
    showLost(false);
    showState(JSON.parse(message.data));
  });
  stream.addEventListener("event", (message) => addEvent(JSON.parse(message.data)));
  stream.addEventListener("dropped", (message) => {
    byId("dropped").textContent = `· ${JSON.parse(message.data).count} were dropped because this page reads too slowly`;
  });
  stream.addEventListener("error", () => {
    showLost(true);
    // The browser reconnects by itself, unless the response was an error.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connectAgain, RETRY_AFTER);
  });
}

async function connectAgain() {
  try {
    const answer = await fetch("v1/status", { cache: "no-store" });
    if (answer.status === 401) return location.reload(); // the session has expired: show the login form
  } catch {
    // the service is not reachable yet
  }
  connect();
}

setInterval(() => {
  // While disconnected, durations are not counted on.
  if (byId("lost").hidden) document.querySelectorAll("[data-began]").forEach(showTime);
}, 1000);
connect();
