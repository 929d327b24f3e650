// States with their glyphs, and how numbers, times and durations are written.
import { h } from "./dom.js";

// The word of each state, alone and after a name.
export const STATE = {
  works: ["works", "works"],
  degraded: ["degraded", "is degraded"],
  down: ["down", "is down"],
  waits: ["waits for another", "waits"],
  starting: ["starting", "is starting"],
  standby: ["standing by", "stands by for another instance"],
  asleep: ["asleep", "sleeps until it is used"],
  unknown: ["not watched", "is not watched"],
};

// The states that are an outage, or part of one.
export const BAD = new Set(["degraded", "down", "waits"]);

export const TITLE_MARK = { works: "●", degraded: "▲", down: "✖", waits: "▲", starting: "◌", standby: "◐", unknown: "?" };

// Each state has its own shape: not everyone tells colours apart.
const SHAPES = {
  works: [h("circle", { r: 7, class: "fill" }), h("path", { d: "M-3.2 .2-1 2.6 3.4-2.4", class: "cut" })],
  degraded: [h("path", { d: "M0-7.2 7.6 6.4H-7.6Z", class: "fill" }), h("path", { d: "M0-2.4V1.8M0 4.1V4.4", class: "cut" })],
  down: [h("path", { d: "M-3-7.2H3L7.2-3V3L3 7.2H-3L-7.2 3V-3Z", class: "fill" }), h("path", { d: "M-2.6-2.6 2.6 2.6M2.6-2.6-2.6 2.6", class: "cut" })],
  waits: [h("circle", { r: 6, class: "ring dashed" }), h("path", { d: "M-2.8 0H2.4M.4-2.2 2.6 0 .4 2.2", class: "ring thin" })],
  starting: [h("path", { d: "M0-6A6 6 0 1 1-5.4-2.6", class: "ring" }), h("path", { d: "M-2.6-8 .8-6-2.4-3.6Z", class: "fill" })],
  standby: [h("circle", { r: 6, class: "ring" }), h("path", { d: "M0-6A6 6 0 0 1 0 6Z", class: "fill" })],
  asleep: [h("circle", { r: 6, class: "ring" }), h("path", { d: "M-2.2-2.4H2.2L-2.2 2.4H2.2", class: "ring thin" })],
  unknown: [h("circle", { r: 6, class: "ring dotted" })],
};

export const known = (state) => (SHAPES[state] ? state : "unknown");

// The glyph as a group of an SVG picture. Each is new: an element has one place.
export function shape(state, transform) {
  const kids = SHAPES[known(state)].map((each) => ({ ...each }));
  return h("g", { class: `glyph ${known(state)}`, transform }, kids);
}

export function glyph(state, size = 16) {
  return h("svg.icon", { width: size, height: size, viewBox: "-8 -8 16 16", "aria-hidden": "true" }, shape(state));
}

// -- times

// Times of day are those of the service, as in its sentences and logs.
let zone = -60 * new Date().getTimezoneOffset();
export const setZone = (seconds) => {
  zone = seconds ?? zone;
};
export const zoned = (t) => t + zone;
export function clock(t) {
  const s = Math.floor(zoned(t)) % 86400;
  return [s / 3600, (s / 60) % 60, s % 60].map((each) => String(Math.floor(each)).padStart(2, "0")).join(":");
}

export function took(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.0005) return "0 s";
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 59.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// -- numbers

const rounded = (value) => (Number.isInteger(value) || Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(Math.abs(value) < 0.1 ? 2 : 1));

// A number and its unit: [4.5, "/s"].
export function amount(value, unit) {
  if (!Number.isFinite(value)) return ["–", ""];
  if (unit === "B") {
    const place = value < 1000 ? 0 : value < 1e6 ? 1 : value < 1e9 ? 2 : 3;
    const number = value / 1000 ** place;
    return [place ? number.toFixed(1) : String(Math.round(number)), ["B", "kB", "MB", "GB"][place]];
  }
  if (unit === "s") {
    if (value && value < 1) return [(value * 1000).toFixed(value < 0.1 ? 1 : 0), "ms"];
    return value < 60 ? [value.toFixed(1), "s"] : [took(value), ""];
  }
  return [unit === "/s" ? (value < 1000 ? value.toFixed(1) : rounded(value)) : rounded(value), unit];
}

export function measured(value, unit) {
  const [number, word] = amount(value, unit);
  return word.startsWith("/") ? number + word : [number, word].filter(Boolean).join(" ");
}

// -- links

// What the address shows: part, at, outage, span, drawer, words, lanes, outages; without a value: "".
let read = null;
let found = {};
export function address() {
  if (read !== location.hash) {
    read = location.hash;
    found = Object.fromEntries(new URLSearchParams(read.slice(1)));
  }
  return found;
}

// The address with some of it changed; null takes one out.
export function link(change) {
  const all = Object.entries({ ...address(), ...change }).filter(([, value]) => value !== null);
  return `#${all.map(([name, value]) => (value === "" ? name : `${name}=${encodeURIComponent(value)}`)).join("&")}`;
}

export const toPart = (name) => link({ part: name, at: null, outage: null, words: null });
