"""The words of the service: the answer to "how is it?", and the incidents, as text and plain data.

Page, status, `moored top` and `explain` show these words, and make none of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import Any, NamedTuple

from moored.kernel import counted

from ._incidents import Incident
from ._judge import BAD, GOOD, Judged, waiting_words
from ._part import cost_words
from ._spans import clock_time, span

__all__ = ["Now", "answer", "as_data", "lines_of", "name_of", "sentence", "step_words"]

SILENT = (
    "Connections stay open but nothing arrives: the server is frozen, overloaded, or the network "
    "drops its packets."
)
BY_ITSELF = "Moored connects again by itself."


class Words(NamedTuple):
    """What is broken, in the present and in the past tense, why, and what to do."""

    now: str
    past: str
    why: str
    do: str
    #: Whether the command that explains the node helps.
    explain: bool = True
    note: str = ""


@dataclass(frozen=True)
class Now:
    """What an answer is made from."""

    judged: Mapping[str, Judged]
    incidents: Sequence[Incident]
    now: float
    #: What to add to a monotonic time, to get seconds since 1970.
    wall: float
    #: Since when the service runs.
    began: float
    #: Whether it has been ready, and is ready now.
    started: bool
    ready: bool
    parts: Collection[str]
    #: The parts without which the service is not ready.
    required: Collection[str] = ()
    #: The parts that keep their place while they wait: streams, consumers and brokers.
    keeping: Collection[str] = ()


def name_of(node: str, judged: Mapping[str, Judged]) -> str:
    """Return what a part or server is called: "PostgreSQL" if it is the only one of its kind."""
    found = judged.get(node)
    if found is None or not found.is_server or not found.kind:
        return node
    alike = [each for each in judged.values() if each.is_server and each.kind == found.kind]
    return found.kind if len(alike) == 1 else f"{found.kind} ({node})"


def step_words(node: str, judged: Mapping[str, Judged]) -> str:
    """Return how a part or server is, as a step of an incident."""
    found, name = judged[node], name_of(node, judged)
    if found.state == "waits":
        return f"{name} {found.fact}"
    if found.how in ("degraded", "callers"):
        return f"{name}: {found.fact}"
    return _words(node, found, judged).now.removesuffix(".")


# -- one incident ------------------------------------------------------------------------------


def _words(node: str, found: Judged, judged: Mapping[str, Judged]) -> Words:
    """Return the words for the root of an incident, by how it fails."""
    name = name_of(node, judged)
    why = _sentence(found.why)
    if found.is_server:
        return _of_server(name, found, why)
    server = f" to {found.kind}" if found.kind else ""
    match found.how:
        case "silent":
            return Words(
                f"{name} gets no answer on its {found.of}.",
                f"{name} got no answer on its {found.of}",
                f"No byte arrives and no error either; others reach {found.kind or 'the server'}.",
                f"Look at the path from {name} to {found.kind or 'its server'}:",
                note=BY_ITSELF,
            )
        case "lost":
            return Words(
                f"{name} has lost its {found.of}{server}.",
                f"{name} lost its {found.of}{server}",
                why,
                f"Nothing: {BY_ITSELF}",
                explain=False,
            )
        case "failed":
            text = f"Correct the cause, then restart {name}:"
            return Words(f"{name} has failed for good.", f"{name} failed for good", why, text)
        case "callers":
            text = f"Find out who holds the connections of {name}:"
            return Words(f"Callers of {name} wait.", f"Callers of {name} waited", why, text)
        case "degraded":
            text = f"Look at {name}:"
            return Words(f"{name} works only in part.", f"{name} worked only in part", why, text)
        case _:
            return Words(
                f"{name} has failed, and is coming back.",
                f"{name} failed",
                why,
                f"Read why {name} has failed:",
                note="Moored starts it again by itself.",
            )


def _of_server(name: str, found: Judged, why: str) -> Words:
    match found.how:
        case "silent":
            now, past = f"{name} does not answer.", f"{name} did not answer"
            return Words(now, past, SILENT, "Look at the server:", note=BY_ITSELF)
        case "ended" | "failed":
            now, past = f"{name} has ended, and is coming back.", f"{name} restarted"
            return Words(now, past, why, "Nothing: Moored starts it again.", explain=False)
        case _:
            now, past = f"{name} cannot be reached.", f"{name} could not be reached"
            return Words(now, past, why, "Look at the server:", note=BY_ITSELF)


def as_data(incident: Incident, at: Now) -> dict[str, Any]:
    """Return an incident as plain data for JSON, with all its words."""
    words, wall = _words(incident.root, _judged(incident, at), at.judged), at.wall
    costs = {name: number for name, number in incident.costs.items() if number > 0}
    over = incident.ended is not None
    return {
        "id": incident.id,
        "root": incident.root,
        "what": words.past if over else words.now.removesuffix("."),
        "state": incident.state(),
        "sign_of_life": incident.sign_of_life + wall,
        "noticed": incident.noticed + wall,
        "ended": incident.ended + wall if incident.ended is not None else None,
        "lasted": incident.lasted(at.now),
        "parts": {
            node: [
                [each.begin + wall, None if each.end is None else each.end + wall, each.state]
                for each in spans
            ]
            for node, spans in incident.spans.items()
        },
        "why": words.why,
        "steps": [[max(0.0, when - incident.sign_of_life), text] for when, text in incident.steps],
        "cost": costs,
        "cost_words": cost_words(costs) or "nothing failed",
        "waiting": None if over else _waiting(incident),
        "do": _do("Nothing: it has ended.") if over else _do_about(incident.root, words),
        "fault": incident.fault,
    }


def _waiting(incident: Incident) -> dict[str, Any] | None:
    callers = incident.callers
    if not callers.number:
        return None
    return {
        "number": callers.number,
        "longest": callers.longest,
        "words": waiting_words(callers),
    }


def _do(text: str, command: str | None = None, note: str = "") -> dict[str, Any]:
    return {"text": text, "command": command, "note": note}


def _do_about(node: str, words: Words) -> dict[str, Any]:
    return _do(words.do, f"moored explain {quote(node)}" if words.explain else None, words.note)


# -- the answer --------------------------------------------------------------------------------


def answer(at: Now) -> dict[str, Any]:
    """Return how the service is, and the five answers about what is broken."""
    open_ = sorted(
        (each for each in at.incidents if each.ended is None),
        key=lambda each: _weight(each, at),
        reverse=True,
    )
    missing = [node for node, each in at.judged.items() if each.state == "starting"]
    vital = [node for node in missing if node in at.required]
    if open_ and (not vital or _weight(open_[0], at)[0]):
        return _broken(open_[0], open_[1:], at)
    return _starting(vital or missing, missing, open_, at) if missing else _good(at)


def sentence(at: Now) -> str:
    """Return the answer as one line."""
    found = answer(at)
    text = str(found["what"])
    if found["state"] in ("works", "standby"):
        return f"{text.removesuffix('.')}: {counted(_watched(at), 'part')}."
    why = found["why"].removesuffix(".")
    text = f"{text.removesuffix('.')}: {why}." if why else text
    waits = f" Waiting for it: {', '.join(found['waits'])}." if found["waits"] else ""
    also = f" Also: {'; '.join(found['also'])}." if found["also"] else ""
    return text + waits + also


def lines_of(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the answers to the five questions, each with its label; none if all works."""
    if found["state"] in ("works", "standby"):
        return
    if found["since"] is not None and found["lasted"] is not None:
        yield "since", f"{clock_time(found['since'])}, {span(found['lasted'])}"
    if found["why"]:
        yield "why", found["why"]
    if found["waits"]:
        yield "waits", f"{', '.join(found['waits'])}. {found['keeps']}".strip()
    if found["incident"] is not None:
        yield "cost", found["cost"]
    if (do := found["do"])["text"]:
        words = (do["text"], do["command"], do["note"] and f"({do['note']})")
        yield "do", " ".join(filter(None, words))
    for each in found["also"]:
        yield "also", each


def _watched(at: Now) -> int:
    """Return the number of parts; servers outside of this process are none."""
    return sum(at.judged[each].state != "unknown" for each in at.parts)


def _weight(incident: Incident, at: Now) -> tuple[bool, bool, int, int]:
    required = any(node in at.required for node in incident.affected())
    return required, incident.state() == "down", len(incident.affected()), -incident.id


def _broken(incident: Incident, others: Sequence[Incident], at: Now) -> dict[str, Any]:
    node, found = _subject(incident, at)
    words = _words(node, found, at.judged)
    affected = incident.affected()
    waits = [each for each in affected if at.judged[each].state == "waits" and each != node]
    down = found.state == "down" or incident.state() == "down"
    vital = found.is_server or any(each in at.required for each in affected)
    if node not in affected:  # its root is back, and others are not yet
        rest = ", ".join(affected)
        now = f"{name_of(node, at.judged)} works again; coming back: {rest}."
        words = words._replace(now=now, do=f"Nothing: {BY_ITSELF}", explain=False, note="")
    data = as_data(incident, at)
    waiting = data["waiting"]["words"] if data["waiting"] else ""
    cost = (
        data["cost_words"]
        if data["cost"]
        else "none has failed yet"
        if waiting
        else "nothing failed yet"
    )
    besides = [each for each in affected if each not in (node, *waits)]
    return _answer(
        "down" if down and (vital or not at.ready) else "degraded",
        words.now,
        node=node,
        incident=incident.id,
        since=incident.sign_of_life + at.wall,
        lasted=incident.lasted(at.now),
        why=words.why,
        waits=waits,
        keeps="No change is lost." if any(each in at.keeping for each in (node, *waits)) else "",
        cost="; ".join(filter(None, (waiting, cost))),
        waiting=waiting,
        do=_do_about(node, words),
        also=[*(step_words(each, at.judged) for each in besides), *map(partial(_also, at), others)],
    )


def _also(at: Now, incident: Incident) -> str:
    return _words(incident.root, _judged(incident, at), at.judged).now.removesuffix(".")


def _subject(incident: Incident, at: Now) -> tuple[str, Judged]:
    """Return the root of an incident, or what is still broken although the root works again."""
    affected = incident.affected()
    if incident.root not in affected:
        for each in affected:
            if each in at.judged[each].roots:
                return each, at.judged[each]
    return incident.root, _judged(incident, at)


def _judged(incident: Incident, at: Now) -> Judged:
    """Return how the root of an incident is now, or how it was at worst if it has ended."""
    now = at.judged.get(incident.root)
    own = now is not None and now.state in BAD and incident.root in now.roots
    if now is None or not own or incident.ended is not None:
        return incident.judged
    return now if now.why else replace(now, why=incident.judged.why)


def _starting(
    first: Sequence[str], missing: Sequence[str], others: Sequence[Incident], at: Now
) -> dict[str, Any]:
    """Answer what has not worked yet: of these parts, the first one, or what that waits for."""
    node = _cause(first[0], at)
    found, name = at.judged[node], name_of(node, at.judged)
    watched, what, state = _watched(at), f"{name} has not worked yet.", "degraded"
    ready = sum(at.judged[each].state in GOOD for each in at.parts)
    if not (at.started and at.ready):
        what, state = f"Starting: {ready} of {watched} parts work.", "starting"
    waits = [each for each in missing if each != node and _cause(each, at) == node]
    also = [each for each in missing if each not in (node, *waits) and _cause(each, at) == each]
    return _answer(
        state,
        what,
        node=node,
        since=at.began + at.wall,
        lasted=at.now - at.began,
        why=": ".join(dict.fromkeys(filter(None, (name, found.fact, found.why)))),
        waits=[each for each in waits if each in missing],
        do=_do(f"If it stays so, look at {name}:", f"moored explain {quote(node)}"),
        also=[
            *(f"{name_of(each, at.judged)}: {at.judged[each].fact}" for each in also),
            *map(partial(_also, at), others),
        ],
    )


def _cause(node: str, at: Now) -> str:
    """Return what a node that has not worked yet waits for, in the end."""
    seen = {node}
    while (roots := at.judged[node].roots) and roots[0] not in seen:
        if at.judged[roots[0]].state != "starting":
            break
        node = roots[0]
        seen.add(node)
    return node


def _good(at: Now) -> dict[str, Any]:
    standby = [node for node, each in at.judged.items() if each.state == "standby"]
    last = at.incidents[0] if at.incidents else None
    since = at.began if last is None else max(i.ended or 0.0 for i in at.incidents)
    before = ""
    if last is not None:
        data = as_data(last, at)
        when = clock_time(data["sign_of_life"])
        before = f"The last outage was at {when}: {data['what']}, {span(data['lasted'])}, "
        before += f"{data['cost_words']}."
    what = "Everything works."
    if standby:
        what = f"Everything works; standing by for another instance: {', '.join(standby)}."
    return _answer(
        "standby" if standby else "works",
        what,
        sub=f"{counted(_watched(at), 'part')}, all well",
        before=before,
        since=since + at.wall,
        lasted=at.now - since,
    )


def _answer(state: str, what: str, **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "what": what,
        "sub": "",
        "before": "",
        "node": None,
        "incident": None,
        "since": None,
        "lasted": None,
        "why": "",
        "waits": [],
        "keeps": "",
        "cost": "",
        "waiting": "",
        "do": _do(""),
        "also": [],
        **more,
    }


def _sentence(text: str) -> str:
    """Return a reason as a sentence: without the class of the error, which says nothing new."""
    text = re.sub(r" \([A-Z]\w+\)", "", text.strip().partition("\n")[0].rstrip("."))
    if not text:
        return ""
    first = text.partition(" ")[0]
    return f"{text[0].upper() + text[1:] if first.islower() else text}."
