"""The chain of causes of a component's state, as text.

::

    streaming stopped at 12:00:01, 3.0 s ago
      because  the server closed the connection (57P01 admin shutdown)
      then     3rd retry in 4.2 s, 2.9 s ago
      so       nothing is lost: the slot keeps the changes until we are back

The first line is the newest event of any kind but `info`, with its age. Below it are its causes,
across components (`because`); then the later `info` events of the component (`then`); and the
consequence or advice, from an event's `so=` or `advice=`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ._clock import Clock
from ._words import counted, duration

if TYPE_CHECKING:
    from ._recorder import Event, Recorder

__all__ = ["explain"]

#: How many causes, later events and component names are shown.
MAX_CHAIN = 10
MAX_NOTES = 3
MAX_NAMES = 20
DAY = 86400.0


def explain(recorder: Recorder, component: str, clock: Clock) -> str:
    """Return the newest state of a component, its age, its causes, and what to do about it."""
    events = recorder.events(component)
    if not events:
        return _unknown(recorder, component)
    return "\n".join(_Explanation(recorder, events, clock).lines())


class _Explanation:
    """The newest event of a component, the chain of its causes, and the later notes."""

    def __init__(self, recorder: Recorder, events: list[Event], clock: Clock) -> None:
        self._recorder = recorder
        self._now = clock.monotonic()
        self._subject = ([event for event in events if event.kind != "info"] or events)[-1]
        self._notes = [event for event in events if event.id > self._subject.id]
        self._chain = list(self._chain_of(self._subject))

    def lines(self) -> Iterator[str]:
        yield self._head()
        for words in self._because(self._subject, self._chain):
            yield f"  because  {words}"
        if (earlier := len(self._notes) - MAX_NOTES) > 0:
            yield f"  then     {counted(earlier, 'earlier note')}"
        for note in self._notes[-MAX_NOTES:]:
            yield f"  then     {self._note(note)}"
        if advice := self._advice():
            yield f"  so       {advice}"

    def _head(self) -> str:
        event = self._subject
        age = duration(self._now - event.at)
        if event.kind == "state":
            return f"{event.text} for {age}"
        return f"{event.text} {self._when(event)}, {age} ago"

    def _chain_of(self, event: Event) -> Iterator[Event]:
        cause = self._recorder.cause(event)
        while cause is not None:
            yield cause
            cause = self._recorder.cause(cause)

    def _because(self, subject: Event, chain: list[Event]) -> Iterator[str]:
        for cause in chain[:MAX_CHAIN]:
            yield f"{self._named(cause)} {self._when(cause)}"
        if (more := len(chain) - MAX_CHAIN) > 0:
            yield counted(more, "earlier cause")
            return
        last = chain[-1] if chain else subject
        for words in last.because:
            yield words if last.cause_id is None else f"{words} (its own cause is no longer kept)"

    def _note(self, note: Event) -> str:
        words = f"{note.text}, {duration(self._now - note.at)} ago"
        shown = {self._subject.id, *(cause.id for cause in self._chain)}
        shown.update(other.id for other in self._notes)
        if note.because and note.cause_id not in shown:
            words += f", because {note.because[0]}"
        return words

    def _advice(self) -> str | None:
        for event in [*reversed(self._notes), self._subject, *self._chain]:
            advice = event.data.get("so") or event.data.get("advice")
            if advice:
                return str(advice)
        return None

    def _named(self, event: Event) -> str:
        same = event.component == self._subject.component
        return event.text if same else f"{event.component}: {event.text}"

    def _when(self, event: Event) -> str:
        local = datetime.fromtimestamp(event.wall, tz=UTC).astimezone()
        if self._now - event.at < DAY:
            return f"at {local:%H:%M:%S}"
        return f"on {local:%Y-%m-%d} at {local:%H:%M:%S}"


def _unknown(recorder: Recorder, component: str) -> str:
    known = sorted(recorder.components())
    words = f"no events are recorded for {component!r}"
    if not known:
        return f"{words}, or for any other component yet"
    # "link" most likely means "root/link"; otherwise it may be a typing error.
    holding = [name for name in known if component in name]
    if close := holding or get_close_matches(component, known, n=1):
        words += f"; did you mean {close[0]!r}?"
    if gone := recorder.statistics().dropped_components:
        words += f"; the recorder was full and dropped {counted(gone, 'component')}"
    shown = ", ".join(known[:MAX_NAMES])
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return f"{words}\n  known    {shown}{more}"
