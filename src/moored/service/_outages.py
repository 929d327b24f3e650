"""The last outage of each part, with its cause and length: kept after the part has recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from moored.kernel import Clock, Recorder, duration

__all__ = ["PartOutages"]

#: Seconds before an outage in which the failure that caused it may have been recorded.
BEFORE = 1.0
#: Failures shown for one outage: the first are the causes, the later ones their effects.
MAX_FAILURES = 3


@dataclass
class _Outage:
    at: float
    wall: float
    detail: str
    lasted: float | None = None
    failures: tuple[str, ...] = ()


class PartOutages:
    """The last outage of each part: the time in which `/v1/health` did not return 200 for it."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock
        self._last: dict[str, _Outage] = {}

    def begin(self, part: str, detail: str) -> None:
        """Begin an outage of a part."""
        self._last[part] = _Outage(self._clock.monotonic(), self._clock.wall(), detail)

    def end(self, part: str) -> None:
        """End the outage of a part, if there is one."""
        outage = self._last.get(part)
        if outage is not None and outage.lasted is None:
            outage.failures = tuple(self._failures(outage))
            outage.lasted = self._clock.monotonic() - outage.at

    def as_list(self) -> list[dict[str, Any]]:
        """Return the last outage of each part as plain data, the newest first."""
        found = [
            {
                "part": part,
                "wall": outage.wall,
                "lasted": outage.lasted,
                "because": list(self._causes(outage)),
            }
            for part, outage in self._last.items()
        ]
        return sorted(found, key=lambda each: -each["wall"])

    def lines(self, part: str) -> Iterator[str]:
        """Yield the last outage of a part as lines of an explanation."""
        outage = self._last.get(part)
        if outage is None:
            return
        if outage.lasted is None:
            now = self._clock.monotonic() - outage.at
            yield f"  before   {part} worked until {_time(outage.wall)}, {duration(now)} ago"
        else:
            end = _time(outage.wall + outage.lasted)
            lasted = duration(outage.lasted)
            yield f"  before   {part} did not work for {lasted}, from {_time(outage.wall)} to {end}"
        for words in self._causes(outage):
            yield f"  because  {words}"

    def _causes(self, outage: _Outage) -> Iterable[str]:
        failures = self._failures(outage) if outage.lasted is None else outage.failures
        return list(failures) or [outage.detail]

    def _failures(self, outage: _Outage) -> Iterator[str]:
        shown = 0
        for event in self._recorder.events():
            if event.kind == "failure" and event.at >= outage.at - BEFORE and shown < MAX_FAILURES:
                shown += 1
                why = event.because[0] if event.because else event.text
                yield f"{event.component}: {why}"


def _time(wall: float) -> str:
    return f"{datetime.fromtimestamp(wall, tz=UTC).astimezone():%Y-%m-%d %H:%M:%S}"
