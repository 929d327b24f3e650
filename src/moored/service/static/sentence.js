// The first card: how the service is, in one sentence; if it is not well, five questions and their answers.
import { h } from "./dom.js";
import { factOf, model, outagesOf, stateOf } from "./wire.js";
import { clock, glyph, known, STATE, took, toPart } from "./words.js";

const SPEAK_EVERY = 5000;

// A clock that counts on by itself: the page fills it twice a second.
export const counting = (since, name = "quiet") => h(`span.${name}.count`, { key: "count", "data-since": since });

// Without a secure connection, a page may not write to the clipboard.
export const copyButton = (text) => navigator.clipboard && h("button", { type: "button", class: "copy", "data-copy": text }, "Copy");

const joined = (kids) => kids.flatMap((kid, place) => (place ? [", ", kid] : [kid]));

export const partLink = (id) => h("a", { href: toPart(id) }, model.state.map.nodes.find((each) => each.id === id)?.name ?? id);

function todo({ text, command, note }) {
  return [text, command && h("p.command", h("code", command), " ", copyButton(command)), note && h("span.small.quiet", note)];
}

function five(answer) {
  const row = (question, answers, name) => h("div", { class: name }, h("dt", question), h("dd", answers));
  return h(
    "dl.five",
    row("Since", [h("strong", clock(answer.since)), " ", counting(answer.since)]),
    answer.why && row("Why", answer.why),
    row("Who waits", [
      answer.waits.length ? joined(answer.waits.map(partLink)) : "no other part",
      answer.keeps && h("span.quiet", `. ${answer.keeps}`),
    ]),
    row("Cost so far", answer.cost),
    row("What to do", todo(answer.do), "do"),
    answer.also.length > 0 && row("Also", answer.also.join("; "), "also"),
  );
}

const card = (state, title, ...kids) => h(`section.card.sentence.wide.${known(state)}`, { "aria-labelledby": "says", key: title }, h("h2.unseen", { id: "says" }, title), glyph(state, 30), kids);
const big = (text) => h("p.big", text);

export function lost() {
  const since = model.lostSince / 1000;
  return card("unknown", "No contact",
    h("p.big", "No contact with the service for ", h("span.count", { "data-lost": since }), "."),
    h("p.sub", model.state ? `What you see is from ${clock(model.at)}. ` : "", "The page asks again every second. Is the process running? ", h("code", "moored status")));
}

export function sentence() {
  const { answer } = model.state;
  const bad = answer.state === "down" || answer.state === "degraded";
  return card(answer.state, "How the service is",
    big(answer.what),
    answer.sub && h("p.sub", answer.sub, " for ", counting(answer.since), ". ", answer.before),
    bad && five(answer));
}

// The sentence of one part, with what it needs and what it serves.
export function partSentence(id, about) {
  const state = stateOf(id);
  const [last] = outagesOf(id);
  const when = last && `Last outage ${clock(last.sign_of_life)}, ${last.ended === null ? "still going on" : took(last.lasted)}.`;
  const chip = (word) => (each) => h("li", h("a.chip", { href: toPart(each) }, glyph(stateOf(each), 13), h("span.quiet", word), each));
  const [fact, verb] = [factOf(id), STATE[known(state)][1]];
  const broken = last && last.ended === null && last.root === id && last.what;
  const said = fact.startsWith(verb);
  return card(state, "How this part is",
    big(about?.title ?? (broken || `${id} ${said ? fact : verb}`)),
    h("p.sub", [broken ? last.why : fact && !said && `${fact[0].toUpperCase()}${fact.slice(1)}.`, about?.says, when ?? "No outage since the start."].filter(Boolean).join(" ")),
    h("ul.chips", (about?.needs ?? []).map(chip("needs")), (about?.serves ?? []).map(chip("serves"))));
}

// What a screen reader says by itself, at most every few seconds: the answers, without counting clocks.
let spoken = 0;
export function speak(element) {
  if (performance.now() - spoken < SPEAK_EVERY) return;
  const answer = model.state?.answer;
  let text = "";
  if (model.lostSince) text = "No contact with the service.";
  else if (answer?.state === "down" || answer?.state === "degraded") {
    const waits = answer.waits.length ? `Waiting: ${answer.waits.join(", ")}.` : "";
    text = [answer.what, `Since ${clock(answer.since)}.`, answer.why, waits, answer.keeps, answer.cost.replace(answer.waiting, "").replace(/^; /, ""), answer.do.text, answer.do.command, answer.do.note].filter(Boolean).join(" ");
  } else if (answer) text = answer.what;
  if (element.textContent === text) return;
  spoken = performance.now();
  element.textContent = text;
}
