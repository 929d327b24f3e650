// The drawer of the demo: a button for each fault, and the story of what it does, as it happens.
import { h } from "./dom.js";
import { model } from "./wire.js";
import { link, took } from "./words.js";

let problem = "";

export async function press(fault, changed) {
  if (model.state.demo.running) return;
  problem = "";
  try {
    const answer = await fetch(`v1/break/${encodeURIComponent(fault)}`, { method: "POST" });
    if (!answer.ok) problem = (await answer.json()).detail;
  } catch {
    problem = "The service does not answer.";
  }
  changed();
}

function button({ name, title, text }) {
  const { running, last = {} } = model.state.demo;
  // Not disabled, which would lose the focus: a press is ignored, and the service would refuse it.
  const about = { type: "button", class: `fault${running === name ? " running" : ""}`, "data-fault": name, "aria-disabled": running ? "true" : "false" };
  const time = running === name ? "…" : last[name] == null ? "" : `last: ${took(last[name])}`;
  return h("li", { key: name }, h("button", about, h("strong", title), h("span.last", time), h("small", text)));
}

function step(line) {
  const [, time, text] = /^(\S+ (?:ms|s|min \d+ s|min))\s+(.*)$/s.exec(line) ?? [null, "", line];
  return h("p", time && h("b", time), " ", text);
}

export function drawer(narrow) {
  const { faults, lines = [] } = model.state.demo;
  const story = lines.length ? lines.map(step) : h("p.quiet", "Press a fault. What happens is told here, and marked on the map and the timeline.");
  const tell = h("div.tell", { key: "tell", "aria-live": "polite" }, problem ? h("p", problem) : story);
  const list = h("ul", { key: "faults" }, faults.map(button));
  return [
    h("div.head", { key: "head" }, h("h2", { id: "drawer-title" }, "Break something"), h("span.grow"), h("a.button.icon", { id: "drawer-close", href: link({ drawer: null }), "aria-label": "Close" }, "✕")),
    !narrow && h("p.quiet.small", { key: "about" }, "Real faults, on the demo's own servers. One at a time."),
    tell,
    list,
  ];
}
