"""The judgement of every part and server: the state that is shown, one fact, and whose fault it is.

A server is judged over all links to it: it is down if one link has lost it and none hears it. While
another link hears it, the part whose link is lost is the root itself. A part that needs something
that is down `waits`: it is neither down, nor does it work. A part that has worked before is never
`starting` again: it is `down`, and comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moored.kernel import Callers, Link, counted

from ._health import Status
from ._spans import span

__all__ = ["BAD", "GOOD", "Judged", "Observed", "Shown", "judge", "needed", "waiting_words"]

Shown = Literal["works", "degraded", "down", "waits", "starting", "standby", "asleep", "unknown"]

#: The states of an incident.
BAD: tuple[Shown, ...] = ("down", "degraded", "waits")
#: The states of what needs no attention.
GOOD: tuple[Shown, ...] = ("works", "standby", "asleep")
#: Seconds within which a link that hears its server has heard it. Every link notices a silent
#: server later than this: so none counts as hearing it when the first one has noticed.
HEARS = 2.0
#: Seconds that callers may wait before the part does not simply work.
MOMENT = 1.0

_OWN: Mapping[Status, Shown] = {
    "active": "works",
    "sleeping": "asleep",
    "degraded": "degraded",
    "waiting": "standby",
    "starting": "down",
    "failed": "down",
}


@dataclass(frozen=True)
class Observed:
    """What a part reports, and what the service knows about it."""

    health: Status
    detail: str = ""
    #: Whether it has ever worked.
    worked: bool = False
    #: Whether it reports anything at all.
    says: bool = True
    links: Sequence[Link] = ()
    callers: Callers = field(default_factory=Callers)
    #: The fact that is shown while it works.
    fact: str = ""
    #: When it last worked, and when it last worked at least in part, in monotonic seconds.
    worked_at: float | None = None
    ran_at: float | None = None
    #: The root that it has waited for: once that works again, the part is still coming back.
    follows: str | None = None


@dataclass(frozen=True)
class Judged:
    """The judgement of one part or server."""

    state: Shown
    #: At most a dozen words.
    fact: str
    #: Whose fault it is: of one that waits, what it waits for; the node itself if it is the root.
    roots: tuple[str, ...] = ()
    #: When it was last heard, or last worked, in monotonic seconds.
    heard_at: float | None = None
    #: Why, as the part or its links report it.
    why: str = ""
    #: How it fails: "silent", "unreachable", "ended", "lost", "failed", "callers" or "degraded".
    how: str = ""
    #: What kind of server it is, such as "PostgreSQL"; of a part, the server that it has lost.
    kind: str = ""
    #: Which of its links it has lost, such as "change stream".
    of: str = ""
    callers: Callers = field(default_factory=Callers)
    #: Whether it is a server, or a part that runs one.
    is_server: bool = False


def judge(
    parts: Mapping[str, Observed],
    needs: Mapping[str, Collection[str]],
    runs: Mapping[str, str],
    now: float,
    good_at: Mapping[str, float] | None = None,
) -> dict[str, Judged]:
    """Return the judgement of each part, in their order, and then of each server.

    :param good_at: when each part and server was well for the last time.
    :param needs: the parts, and the addresses of servers, that each part needs.
    :param runs: the part that runs a server, by the address of the server.
    """
    return _Judgement(parts, needs, runs, now, good_at or {}).all()


def needed(
    parts: Mapping[str, Observed], needs: Mapping[str, Collection[str]], runs: Mapping[str, str]
) -> dict[str, set[str]]:
    """Return all parts and servers that each part needs, directly or not."""
    direct = _Judgement(parts, needs, runs, 0.0, {}).needs
    found: dict[str, set[str]] = {}
    for part in direct:
        more, mine = [part], set[str]()
        while more:
            for each in direct.get(more.pop(), ()):
                if each not in mine:
                    mine.add(each)
                    more.append(each)
        found[part] = mine
    return found


def waiting_words(callers: Callers, what: str = "request") -> str:
    """Return "6 requests wait, the longest for 15.2 s"; empty if none waits."""
    if not callers.number:
        return ""
    if callers.number == 1:
        return f"1 {what} waits, for {span(callers.longest)}"
    return f"{counted(callers.number, what)} wait, the longest for {span(callers.longest)}"


class _Judgement:
    def __init__(
        self,
        parts: Mapping[str, Observed],
        needs: Mapping[str, Collection[str]],
        runs: Mapping[str, str],
        now: float,
        good_at: Mapping[str, float],
    ) -> None:
        self._parts = parts
        self._runs = runs
        self._now = now
        self._good_at = good_at
        self._links: dict[str, list[Link]] = {}
        for each in parts.values():
            for link in each.links:
                self._links.setdefault(self._node(link.server), []).append(link)
        self.needs = {part: self._needed(part, needs.get(part, ())) for part in parts}
        self._done: dict[str, Judged] = {}

    def all(self) -> dict[str, Judged]:
        servers = [each for needed in self.needs.values() for each in needed]
        return {node: self._of(node) for node in dict.fromkeys((*self._parts, *servers))}

    def _node(self, server: str) -> str:
        return self._runs.get(server, server)

    def _needed(self, part: str, named: Iterable[str]) -> list[str]:
        links = (self._node(each.server) for each in self._parts[part].links)
        nodes = dict.fromkeys((*map(self._node, named), *links))
        return [each for each in nodes if each != part]

    def _of(self, node: str) -> Judged:
        if node not in self._done:
            self._done[node] = Judged("unknown", "not watched")  # of parts that need one another
            found = self._part(node) if node in self._parts else self._server(node)
            self._done[node] = found
        return self._done[node]

    # -- servers -------------------------------------------------------------------------------

    def _server(self, node: str) -> Judged:
        """Judge a server over the links to it."""
        links = self._links.get(node, [])
        kind = next((each.kind for each in links if each.kind), "")
        server = Judged("works", "answers", kind=kind, is_server=True)
        if not links:
            return replace(server, state="unknown", fact="not watched")
        heard_at = max((each.heard_at for each in links if each.heard_at is not None), default=None)
        lost = [each for each in links if each.up is False and not each.refused]
        if lost and not any(map(self._hears, links)):
            how = "silent" if any(map(_silent, lost)) else "unreachable"
            why = next((each.why for each in lost if _silent(each)), lost[0].why)
            if heard_at is None and node not in self._good_at:
                return replace(server, state="starting", fact="not reached yet", why=why, how=how)
            if how != "silent":  # an idle link may not have heard it for long, but notices its end
                heard_at = self._last_good(node, heard_at)
            server = replace(server, why=why, how=how, heard_at=heard_at)
            fact = "does not answer" if how == "silent" else "cannot be reached"
            return replace(server, state="down", fact=fact, roots=(node,))
        if heard_at is None and not any(each.up for each in links) and node not in self._good_at:
            return replace(server, state="starting", fact="not reached yet")
        return replace(server, heard_at=heard_at)

    def _last_good(self, node: str, at: float | None) -> float | None:
        """Return when a node was well, or heard, for the last time."""
        good_at = self._good_at.get(node)
        return max((each for each in (at, good_at) if each is not None), default=None)

    def _hears(self, link: Link) -> bool:
        recent = link.heard_at is not None and self._now - link.heard_at < HEARS
        return link.refused or (bool(link.up) and recent)

    # -- parts ---------------------------------------------------------------------------------

    def _part(self, part: str) -> Judged:
        seen = self._parts[part]
        if not seen.says:
            return Judged("unknown", "not watched")
        own = self._own(part, seen)
        if part in self._runs.values():  # that server is judged over its links, too
            own = self._running(part, own)
        needed = [(each, self._of(each)) for each in self.needs[part]]
        cause = [each for each in needed if each[1].state in ("down", "waits")]
        if cause and own.state != "starting" and seen.health != "failed":
            roots = dict.fromkeys(root for _, judged in cause for root in judged.roots)
            names = [each for each, _ in cause]
            return replace(
                own,
                state="waits",
                fact=f"waits for {self._name(names[0])}",
                roots=tuple(roots),
                how="waits",
            )
        behind = seen.follows and self._of(seen.follows).state not in BAD
        if own.state in ("down", "degraded") and seen.follows and behind:
            return replace(
                own, state="waits", fact="coming back", roots=(seen.follows,), how="follows"
            )
        if (own.state in ("down", "degraded") and seen.health != "failed") and (
            worse := [each for each in needed if each[1].state == "degraded"]
        ):
            return replace(own, roots=worse[0][1].roots)
        if own.state == "starting" and (
            missing := [each for each, judged in needed if judged.state not in GOOD]
        ):
            return replace(own, fact=f"waits for {self._name(missing[0])}", roots=(missing[0],))
        return own

    def _name(self, node: str) -> str:
        """Return what a server is called in a fact: "PostgreSQL", or its name."""
        links = self._links.get(node, ())
        return next((each.kind for each in links if each.kind), node)

    def _own(self, part: str, seen: Observed) -> Judged:
        """Judge a part by itself, without what it needs."""
        state = _OWN[seen.health]
        if not seen.worked and seen.health in ("starting", "degraded"):
            return Judged("starting", seen.detail or "starts", why=seen.detail)
        at = seen.worked_at
        # A pool without a connection that reaches its server just opens others.
        if seen.health == "starting" and seen.links and all(each.up for each in seen.links):
            state = "works"
        fact = (seen.fact if state == "works" else "") or seen.detail
        good = Judged(state, fact, heard_at=at, callers=seen.callers)
        lost = [each for each in seen.links if each.up is False and seen.worked]
        hang = seen.callers.number > 0 and seen.callers.longest > MOMENT
        if state in ("standby", "asleep") or (state == "works" and not lost and not hang):
            return good
        bad = replace(good, roots=(part,), why=seen.detail)
        vital = [each for each in lost if each.vital]
        if state == "down" or vital:
            return self._down(part, seen, vital, bad)
        if hang:
            at = self._now - seen.callers.longest
            fact = waiting_words(seen.callers)
            return replace(bad, state="degraded", fact=fact, heard_at=at, how="callers")
        if lost:
            return replace(self._lost(part, lost, bad), state="degraded")
        return replace(bad, fact=seen.detail or "works only in part", how="degraded")

    def _lost(self, part: str, links: Sequence[Link], bad: Judged) -> Judged:
        """Judge a part by the links that it has lost."""
        one = next(filter(_silent, links), links[0])
        what = one.of or "connection"
        silent = _silent(one)
        heard = [each.heard_at for each in links if each.heard_at is not None]
        at = min(heard, default=bad.heard_at)
        return replace(
            bad,
            fact=f"no answer on the {what}" if silent else f"the {what} is lost",
            heard_at=at if silent else self._last_good(part, at),
            why=one.why,
            how="silent" if silent else "lost",
            kind=one.kind,
            of=what,
        )

    def _down(self, part: str, seen: Observed, lost: Sequence[Link], bad: Judged) -> Judged:
        if lost:
            return replace(self._lost(part, lost, bad), state="down")
        at = bad.heard_at if seen.ran_at is None else seen.ran_at
        if seen.health == "failed":
            return replace(bad, state="down", heard_at=at, how="failed")
        return replace(bad, state="down", fact="coming back", heard_at=at, how="ended")

    def _running(self, part: str, own: Judged) -> Judged:
        """Judge a part that runs a server, by the links of others to that server, too."""
        server = self._server(part)
        if own.state == "works" and server.state == "down":
            return replace(server, roots=(part,))
        return replace(own, kind=server.kind, is_server=True)


def _silent(link: Link) -> bool:
    """Whether the server does not answer; its own errors, such as a timeout of it, are answers."""
    words = ("silent", "no answer", "not answered", "timed out", "timeout expired", "timeouterror")
    return link.silent or any(each in link.why.lower() for each in words)
