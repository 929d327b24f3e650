"""The numbers and states of the last hour: kept in the service, so that a page begins with them.

The numbers of one tick are one row, a packed array, so that writing hundreds of them takes less
than 0.1 ms. The last quarter of an hour is kept every 2 s, and the last hour as the least and the
most of each 20 s. What was not measured is NaN.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import nan
from typing import Any, NamedTuple

__all__ = ["COARSE", "FINE", "SPANS", "STATES", "STEP", "History", "Lane"]

#: Seconds between two rows, and how many are kept.
STEP = 2.0
FINE = 450
#: Rows of which the least and the most are kept for longer, and how many of these are.
MERGED = 10
COARSE = 180
#: Changes of state that are kept for each node.
CHANGES = 256
#: The most series.
MAX_SERIES = 400
#: Seconds that can be asked for.
SPANS = (120, 900, 3600)

STATES = ("works", "degraded", "down", "waits", "starting", "standby", "asleep", "unknown")


class Rows(NamedTuple):
    """The numbers of a span: of each series, and the most if `values` are the least."""

    #: The monotonic time of the first row.
    first: float
    step: float
    values: Mapping[str, array[float]]
    most: Mapping[str, array[float]]


class Lane:
    """The last states of one node, each since when, and in which incident."""

    __slots__ = ("_incidents", "_states", "_times")

    def __init__(self) -> None:
        self._times = array("d")
        self._states = array("b")
        self._incidents = array("i")

    def add(self, now: float, state: str, incident: int | None) -> None:
        """Add a state, unless it is the newest one."""
        code, number = STATES.index(state), incident or 0
        if self._states and (self._states[-1], self._incidents[-1]) == (code, number):
            return
        for each in (self._times, self._states, self._incidents):
            del each[: max(len(each) - CHANGES + 1, 0)]
        self._times.append(now)
        self._states.append(code)
        self._incidents.append(number)

    def since(self, begin: float) -> Iterator[tuple[float, str, int | None]]:
        """Yield the state at this time, and all later ones."""
        first = max(sum(each <= begin for each in self._times) - 1, 0)
        for number in range(first, len(self._times)):
            incident = self._incidents[number] or None
            yield self._times[number], STATES[self._states[number]], incident

    @property
    def state(self) -> str | None:
        """The newest state; None if there is none."""
        return STATES[self._states[-1]] if self._states else None

    def __sizeof__(self) -> int:
        parts = (self._times, self._states, self._incidents)
        return object.__sizeof__(self) + sum(map(sys.getsizeof, parts))


class History:
    """The numbers of all series, and the states of all nodes.

    :param began: when the process began, in monotonic seconds: rows are at multiples of `STEP`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._columns: dict[str, int] = {}
        #: The number of the next row, from `began`.
        self._next = 0
        self._fine: deque[array[float]] = deque(maxlen=FINE)
        self._least: deque[array[float]] = deque(maxlen=COARSE)
        self._most: deque[array[float]] = deque(maxlen=COARSE)
        #: Of each node, its states.
        self.lanes: dict[str, Lane] = {}

    def write(self, now: float, values: Mapping[str, float]) -> None:
        """Write the numbers of this tick; ticks that were missed are gaps."""
        number = round((now - self._began) / STEP)
        for _ in range(max(self._next, number - COARSE * MERGED), number):
            self._append(array("f"))
        if number < self._next:
            return  # two ticks at once, after a long pause
        self._next = number
        if len(self._columns) < MAX_SERIES and values.keys() - self._columns.keys():
            for name in values:
                if len(self._columns) < MAX_SERIES:
                    self._columns.setdefault(name, len(self._columns))
        self._append(array("f", [values.get(name, nan) for name in self._columns]))

    def _append(self, row: array[float]) -> None:
        self._fine.append(row)
        self._next += 1
        if self._next % MERGED == 0:
            rows = list(islice(reversed(self._fine), MERGED))
            columns = [[each for each in one if each == each] for one in self._transposed(rows)]
            self._least.append(array("f", [min(each, default=nan) for each in columns]))
            self._most.append(array("f", [max(each, default=nan) for each in columns]))

    def add(self, now: float, node: str, state: str, incident: int | None = None) -> None:
        """Add the state of a node."""
        if (lane := self.lanes.get(node)) is None:
            lane = self.lanes[node] = Lane()
        lane.add(now, state, incident)

    def rows(self, span: float) -> Rows:
        """Return the numbers of the last `span` seconds."""
        names = list(self._columns)
        if span <= FINE * STEP:
            count = min(len(self._fine), round(span / STEP))
            fine = list(self._fine)[len(self._fine) - count :]
            first = self._began + (self._next - count) * STEP
            return Rows(first, STEP, self._named(names, fine), {})
        rest = self._next % MERGED
        first = self._began + (self._next - rest - len(self._least) * MERGED) * STEP
        least, most = self._named(names, self._least), self._named(names, self._most)
        return Rows(first, STEP * MERGED, least, most)

    def as_dict(self, span: int, began_wall: float, series: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers and states of the last seconds, for the page.

        :param began_wall: when the process began, in seconds since 1970.
        :param series: what is known of each series: those without are left out.
        """
        found, to_wall = self.rows(span), began_wall - self._began
        end = self._began + self._next * STEP
        return {
            "began": began_wall,
            "from": found.first + to_wall,
            "step": found.step,
            "series": {
                name: {
                    **series[name],
                    "values": packed(values),
                    **({"most": packed(found.most[name])} if found.most else {}),
                }
                for name, values in found.values.items()
                if name in series
            },
            "lanes": {
                node: [[at + to_wall, *rest] for at, *rest in lane.since(end - span)]
                for node, lane in self.lanes.items()
            },
        }

    def _named(self, names: Iterable[str], rows: Iterable[array[float]]) -> dict[str, array[float]]:
        return dict(zip(names, self._transposed(list(rows)), strict=True))

    def _transposed(self, rows: Iterable[array[float]]) -> list[array[float]]:
        """Return the column of each series: rows from before its first number are shorter."""
        width, flat = len(self._columns), array("f")
        for row in rows:
            flat.extend(row)
            flat.extend([nan] * (width - len(row)))
        return [flat[place::width] for place in range(width)]

    def __sizeof__(self) -> int:
        kept = (*self._fine, *self._least, *self._most, *self.lanes.values())
        return object.__sizeof__(self) + sum(map(sys.getsizeof, kept))


def packed(values: array[float]) -> str:
    """Return numbers as base64 of little-endian floats of 32 bits."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return b64encode(values.tobytes()).decode()
