// The live page. It reads one stream of server-sent events, which begins with the whole state.
"use strict";

const MAX_EVENTS = 200;
const MAX_OUTAGES = 6;
const RETRY_AFTER = 2000;

const byId = (id) => document.getElementById(id);

// Change an element into another, and keep what is equal: the focus, the place of a scroll, a transition.
function patch(current, wanted) {
  if (current.nodeName !== wanted.nodeName) return current.replaceWith(wanted);
  if (current.nodeType === Node.TEXT_NODE) {
    if (current.data !== wanted.data) current.data = wanted.data;
    return;
  }
  for (const { name } of [...current.attributes]) if (!wanted.hasAttribute(name)) current.removeAttribute(name);
  for (const { name, value } of wanted.attributes) {
    if (current.getAttribute(name) === value) continue;
    if (name === "style") current.style.cssText = value; // the page's policy refuses the attribute
    else current.setAttribute(name, value);
  }
  const old = [...current.childNodes];
  [...wanted.childNodes].forEach((child, place) => (old[place] ? patch(old[place], child) : current.append(child)));
  old.slice(wanted.childNodes.length).forEach((child) => child.remove());
}

function show(id, ...content) {
  const wanted = byId(id).cloneNode(false);
  wanted.append(...content);
  patch(byId(id), wanted);
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

// A button that shows why a component is in its state.
function whyButton(className, text, component, state) {
  const button = make("button", className, text);
  button.type = "button";
  button.dataset.why = component;
  button.setAttribute("aria-label", `why is ${component} ${state}?`);
  return button;
}

// One card for each part: its health, why, and what its system shows.
function part(name, state) {
  const kind = state.kinds[name];
  const card = make("section", "part");
  card.dataset.part = name;
  if (kind) card.dataset.kind = kind;
  const row = make("div", "row");
  const health = state.parts[name];
  const conditions = state.conditions_of[name].map((each) => state.conditions[each]);
  row.append(make("h2", "name", name), make("span", `badge ${health}`, health));
  row.append(whyButton("why", "why?", name, health));
  if (conditions.length) row.append(timeSince(Math.min(...conditions.map((each) => each.for))));
  card.append(row);
  for (const each of conditions) {
    if (each.detail) card.append(make("p", "detail", each.detail.replace(`${health}: `, "")));
  }
  const facts = make("ul", "facts");
  if (kind) facts.append(...system(name, kind, state[name]));
  const own = state.machines.filter((each) => each.part === name);
  facts.append(...own.map(machine));
  if (facts.children.length) card.append(facts);
  mark(card, `part ${name}`, health);
  return card;
}

// One incident: when, which parts, how long, why, and what it cost.
function outage(it) {
  const item = make("li", it.lasted === null ? "ongoing" : "");
  const row = make("div", "row");
  const worst = Object.values(it.parts).every((state) => state === "degraded") ? "degraded" : "not working";
  if (it.lasted === null) row.append(make("span", "badge failed", worst));
  else row.append(make("span", "badge active", "recovered"), make("strong", "took", `all parts after ${duration(it.lasted)}`));
  row.append(make("span", "time", clockTime(it.wall)));
  item.append(row, make("p", "name", Object.entries(it.lasted_of).map(([name, lasted]) => (lasted === null ? name : `${name} ${duration(lasted)}`)).join(", ")));
  for (const cause of it.because) item.append(short(`because ${cause}`));
  const cost = costText(it.cost);
  if (cost) item.append(make("p", "detail", `cost: ${cost}`));
  return item;
}

function node(it, above) {
  const path = above ? `${above}/${it.name}` : it.name;
  const item = make("li");
  item.dataset.path = path;
  const row = make("div", "row");
  row.append(make("span", "name", it.name), whyButton(`badge ${it.state}`, it.state, path, it.state));
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
  const when = make("td", "time", clockTime(it.wall));
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
  document.title = word === "active" ? byId("service").textContent : `${word} · ${byId("service").textContent}`;
}

let process = null;

function showState(state) {
  if (process !== state.started_at) {
    // Another process than before: its events are numbered from 1 again.
    process = state.started_at;
    newest = 0;
    shown.clear();
    histories.clear();
    byId("events").replaceChildren();
  }
  showStatus(state.status);
  show("about", `${state.version} · pid ${state.pid} · `, timeSince(state.uptime, "up "));
  byId("service").textContent = state.tree.name;
  const since = state.sentence_for >= 1 ? [", ", timeSince(state.sentence_for)] : [];
  show("sentence", state.sentence.replace(/\.$/, ""), ...since, ".");
  const faults = Object.keys(state.kinds).find((name) => state.kinds[name] === "faults");
  showFaults(faults && state[faults]);
  const parts = Object.keys(state.parts).filter((name) => name !== "http" && name !== faults);
  show("parts", ...parts.map((name) => part(name, state)));
  show("tree", node(state.tree, ""));
  show("outages", ...state.outages.slice(0, MAX_OUTAGES).map(outage));
  byId("outages-section").hidden = state.outages.length === 0;
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

// Why a component is in its state: its causes, as `moored explain` prints them.
async function explain(name) {
  byId("why-title").textContent = name;
  byId("why-text").textContent = "";
  byId("why").showModal();
  let text = "The service does not respond.";
  try {
    const path = name.split("/").map(encodeURIComponent).join("/");
    const answer = await fetch(`v1/explain/${path}`, { cache: "no-store" });
    const found = await answer.json();
    text = answer.ok ? found.explanation : found.detail;
  } catch {
    // no answer
  }
  byId("why-text").textContent = text;
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

document.querySelector("main").addEventListener("click", (event) => event.target.dataset.why && explain(event.target.dataset.why));
byId("why-close").addEventListener("click", () => byId("why").close());
setInterval(() => {
  // While disconnected, durations are not counted on.
  if (byId("lost").hidden) document.querySelectorAll("[data-began]").forEach(showTime);
}, 1000);
connect();
