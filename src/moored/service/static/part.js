// The page of one part: what it is doing, with what it needs, and everything that is known about it.
import { h } from "./dom.js";
import { chart, drawn, flatRow, isFlat } from "./charts.js";
import { membersOf } from "./map.js";
import { outageRows } from "./outages.js";
import { copyButton, partSentence } from "./sentence.js";
import { spanLinks } from "./timeline.js";
import { factOf, model, outagesOf, readNumbers, readPart, stateOf } from "./wire.js";
import { clock, glyph, known, STATE, took, toPart } from "./words.js";

const READ_EVERY = 10_000;

let asked = null; // name, state and time of the last question
let about = null;
let missing = "";

// What is known of a part before the answer.
function begun(name) {
  const { nodes } = model.state.map;
  const series = Object.keys(model.series).filter((each) => model.series[each].part === name);
  const serves = nodes.filter((each) => each.needs.includes(name)).map((each) => each.id);
  const needs = nodes.find((each) => each.id === name)?.needs ?? [];
  return { needs, serves, series, says: "", facts: [], steps: [], settings: [], events: [], explain: "", tree: null };
}

// Ask again when another part is shown, when its state has changed, and now and then.
function ask(name, changed) {
  const at = performance.now();
  const key = `${name} ${stateOf(name)} ${outagesOf(name)[0]?.id} ${outagesOf(name)[0]?.ended}`;
  if (asked && asked.key === key && at - asked.at < READ_EVERY) return;
  if (asked?.name !== name) [about, missing] = [begun(name), ""];
  asked = { name, key, at };
  readNumbers(name).catch(console.error);
  readPart(name).then(
    (found) => {
      if (asked.name === name) [about, missing] = [found, ""];
      changed();
    },
    (error) => {
      if (asked.name === name) missing = error.message;
      changed();
    },
  );
}

export const card = (title, name, beside, ...kids) => h("section", { class: `card ${name}`, key: title, "aria-label": title }, h("div.head", h("h2", title), beside), kids);

const rows = (pairs) => h("dl.facts", pairs);

function settings(all) {
  const setting = ({ name, value, default: usual, help, own }) => h("tr", { key: name }, h("td", help ? h("abbr", { tabindex: 0, "data-tip": `${name}\n${help}`, "aria-label": `${name}: ${help}` }, h("code", name)) : h("code", name)), h("td", value), own && h("td.quiet", usual));
  const head = h("thead", h("tr", ["Setting", "Value", "Default"].map((each) => h("th", { scope: "col" }, each))));
  const [own, others] = [true, false].map((which) => all.filter((each) => each.own === which));
  return card("Settings in force", "", null,
    own.length > 0 && h("table", head, h("tbody", own.map(setting))),
    others.length > 0 && h("details", { key: "others" }, h("summary", `${others.length} with their defaults`), h("table", h("tbody", others.map(setting)))));
}

function branch(tree) {
  const again = tree.restarts ? `, restarted ${tree.restarts === 1 ? "once" : `${tree.restarts} times`}` : "";
  return h("li", { key: tree.name }, h("span", h("code", tree.name), h("span.quiet.small", ` ${tree.state} for ${took(tree.since)}${again}`)),
    tree.last_failure && h("p.quiet.small", `last failure: ${tree.last_failure}`),
    tree.children?.length > 0 && h("ul", tree.children.map(branch)));
}

function left(name) {
  const names = about.series.filter(drawn);
  const moving = names.filter((each) => !isFlat(each));
  const still = names.filter((each) => isFlat(each));
  const happened = about.events.slice(0, 12);
  return [
    card("Timeline", "time", spanLinks(), h("div", { "data-plot": "lanes", "data-lanes": JSON.stringify([name, ...about.needs.filter((each) => each in model.lanes)]) }), outageRows(outagesOf(name), true)),
    names.length > 0 && card("Numbers", "", h("span.quiet.small", "shaded: an outage"),
      moving.length > 0 && h("div.charts", moving.map((each) => chart(each, { own: true }))),
      still.length > 0 && rows(still.map(flatRow))),
    happened.length > 0 && card("What happened here", "", null, h("table", h("tbody", happened.map(([t, text], place) => h("tr", { key: `${t} ${place}` }, h("td.quiet.when", clock(t)), h("td", text)))))),
  ];
}

function right(name) {
  const { steps, facts, explain, tree } = about;
  return [
    card("Now", "", null, rows([["State", STATE[known(stateOf(name))][0]], ...facts].map(([label, text]) => [h("dt", { key: `${label} name` }, label), h("dd", { key: label }, text)]))),
    steps.length > 0 && card("Steps", "", null, h("ol.steps", steps.map(([t, text, seconds], place) => h("li", { key: `${t} ${text}`, class: place === steps.length - 1 ? "on" : "", "aria-current": place === steps.length - 1 ? "step" : null, "data-tip": `${text}\n${clock(t)}${seconds === null ? "" : `, ${took(seconds)}`}` }, text)))),
    explain && card("Explanation", "", h("span.beside", h("code", `moored explain ${name}`), " ", copyButton(explain)), h("pre", explain)),
    about.settings.length > 0 && settings(about.settings),
    tree && h("details.card", { key: "tree" }, h("summary", h("h2", "Supervision tree")), h("ul.tree", branch(tree))),
  ];
}

function stack(name, members) {
  const one = (id) => h("li", { key: id }, h("a.chip", { href: toPart(id) }, glyph(stateOf(id), 13), h("span", id), h("span.quiet", factOf(id))));
  const worst = [...members].sort((a, b) => (stateOf(a) === "works") - (stateOf(b) === "works"));
  return [partSentence(name, { title: name, says: "", needs: [], serves: [] }), card("Its parts", "wide", null, h("ul.chips", worst.map(one)))];
}

export function partPage(name, changed) {
  const members = membersOf(name);
  if (members) return stack(name, members);
  ask(name, changed);
  if (missing && !(name in model.state.nodes)) {
    return h("section.card.wide.sentence", { key: "missing" }, glyph("unknown", 30), h("p.big", "There is no such part."), h("p.sub", missing));
  }
  return [partSentence(name, about), h("div.column", { key: "left" }, left(name)), h("div.column", { key: "right" }, right(name))];
}
