// The outages as rows, the newest first; an open row tells what happened, step by step.
import { h } from "./dom.js";
import { counting } from "./sentence.js";
import { chosen, toOutage } from "./timeline.js";
import { model } from "./wire.js";
import { address, clock, link, took } from "./words.js";

const SHOWN = 5;
const FEW = 3;

function steps(outage) {
  const last = outage.steps.length - 1;
  return h("ol.story", outage.steps.map(([seconds, text], place) => {
    const mood = place === last && outage.ended !== null ? "good" : place ? "" : "bad";
    return h("li", { class: mood }, h("b", took(seconds)), " ", text);
  }));
}

function row(outage, open) {
  const over = outage.ended !== null;
  return h("li", { key: String(outage.id) },
    h("a.row", { href: toOutage(outage), "aria-expanded": open ? "true" : "false", role: "button" },
      h("span", { class: `num ${outage.state}` }, String(outage.id)),
      h("span.when", clock(outage.sign_of_life)),
      h("span.what", outage.what),
      over ? h("span.took", took(outage.lasted)) : counting(outage.sign_of_life, "took"),
      h("span.why", outage.why),
      h("span.cost.quiet", (model.state.answer.incident === outage.id && model.state.answer.waiting) || outage.cost_words)),
    open && steps(outage));
}

export function outageRows(all = model.outages, few = innerWidth < 640) {
  if (!all.length) return h("p.quiet.small", "No outage since the start. When something breaks, it is listed here with its time, its cause and what it cost.");
  const most = "outages" in address() ? Infinity : few ? FEW : SHOWN;
  const open = chosen();
  const shown = all.filter((each, place) => place < most || each === open || each.ended === null);
  return [
    h("ol.rows", { key: "rows" }, shown.map((each) => row(each, each === open))),
    all.length > shown.length && h("p.all", { key: "all" }, h("a.button", { href: link({ outages: "" }) }, `Show all ${all.length}`)),
  ];
}
