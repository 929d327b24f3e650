"""The timeline of `moored top`: a row for each part and server, as on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from moored.kernel import counted
from moored.service import clock_time

__all__ = ["Timeline"]

#: Seconds that it shows, and between two times below it.
SPAN = 900.0
TICK = 180.0
#: Its columns, at least and with the names at most, and those of the names.
LEAST, WIDEST = 24, 120
NAMES = 24
#: Rows up to which all parts are shown, and not only those that an outage has affected.
MOST = 12
#: How the states of an outage are drawn, from the worst on.
BARS = {"down": ("█", "red"), "degraded": ("▒", "yellow"), "waits": ("░", "yellow")}
WORKED, BEFORE = ("─", "green"), ("·", "dim")


class Timeline:
    """The numbers of the outages, a row for each part or server, and times.

    :param state: the status of the service.
    :param groups: the parts and servers in their order.
    """

    def __init__(self, state: Mapping[str, Any], groups: Iterable[Sequence[str]]) -> None:
        nodes = state["nodes"]
        self._now: float = state["started_at"] + state["uptime"]
        self._started: float = state["started_at"]
        since = self._now - SPAN
        self._outages = [each for each in state["outages"] if (each["ended"] or self._now) > since]
        self._states = {
            node: nodes[node]["state"]
            for group in groups
            for node in group
            if node in nodes and nodes[node]["state"] != "unknown"
        }
        affected = {node for outage in self._outages for node in outage["parts"]}
        few = len(self._states) <= MOST
        self._shown = [node for node in self._states if few or node in affected]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        label = min(max(map(len, self._shown), default=0), NAMES) + 3
        columns = min(options.max_width, WIDEST) - label
        if columns < LEAST:
            return
        row = _Row(self._now, columns, self._started)
        yield Text(" " * label + row.numbers(self._outages), "bold")
        for node in self._shown:
            glyph, style = BARS.get(self._states[node], (" ", ""))
            name = node if len(node) <= NAMES else f"{node[: NAMES - 1]}…"
            head = Text.assemble((glyph, style), f" {name:<{label - 3}} ")
            yield head.append_text(row.lane(node, self._outages))
        if others := len(self._states) - len(self._shown):
            yield Text(f"  {counted(others, 'other part')} without an outage", "dim")
        yield Text(" " * label + row.times(), "dim")


class _Row:
    """Where the times of a span are in a row of so many columns."""

    def __init__(self, now: float, columns: int, started: float) -> None:
        self._begin, self._now, self._columns = now - SPAN, now, columns
        self._first = self._column(started)

    def _column(self, at: float) -> int:
        place = int((at - self._begin) / SPAN * self._columns)
        return min(max(place, 0), self._columns - 1)

    def lane(self, node: str, outages: Sequence[Mapping[str, Any]]) -> Text:
        """Return the bars of one part or server; each outage has a column at least."""
        worst = [BEFORE] * self._first + [WORKED] * (self._columns - self._first)
        ranked = [*BARS.values(), WORKED, BEFORE]
        for outage in outages:
            for begin, ended, state in outage["parts"].get(node, ()):
                bar = BARS[state]
                for place in range(self._column(begin), self._column(ended or self._now) + 1):
                    worst[place] = min(worst[place], bar, key=ranked.index)
        return Text.assemble(*worst)

    def numbers(self, outages: Sequence[Mapping[str, Any]]) -> str:
        """Return the number of each outage above its middle, the newest first where they touch."""
        found = [" "] * self._columns
        for outage in outages:  # the newest first
            middle = (outage["sign_of_life"] + (outage["ended"] or self._now)) / 2
            text = str(outage["id"])
            place = min(self._column(middle), self._columns - len(text))
            around = range(max(place - 1, 0), min(place + len(text) + 1, self._columns))
            if all(found[each] == " " for each in around):
                found[place : place + len(text)] = text
        return "".join(found).rstrip()

    def times(self) -> str:
        """Return the times of day below a row, and "now" at its end."""
        found = " " * (self._columns - 3) + "now"
        at = ceil(self._begin / TICK) * TICK
        while at < self._now:
            text, place = clock_time(at)[:5], self._column(at)
            if place + len(text) < self._columns - 3:
                found = found[:place] + text + found[place + len(text) :]
            at += TICK
        return found
