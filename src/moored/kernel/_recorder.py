"""A bounded list of events per component, each linked to its cause.

The recorder stays on in production, so recording is cheap: no lock, no formatting, one tuple and
one append. Each step (the next number, an append, a move to the end, a cut) is a single operation
that the interpreter does not interrupt, so threads and loops may record at the same time. An event
refers to its cause by number, so that it does not keep a long chain of causes in memory.
"""

from __future__ import annotations

import itertools
from asyncio import AbstractEventLoop, _get_running_loop
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ._clock import Clock
from ._explain import explain
from ._observers import Observers
from ._words import causes_of, describe, plain, refuse, unmet

__all__ = ["Cause", "Event", "Recorder", "RecorderStatistics", "Sink", "in_words"]


class Event(NamedTuple):
    """One thing that happened to a component."""

    #: The number of the event, growing within one recorder.
    id: int
    #: When it happened, in monotonic seconds.
    at: float
    #: When it happened, in seconds since 1970.
    wall: float
    #: The component that the event is about.
    component: str
    #: `state` (the component has entered this state), `failure`, `info`, or a word of your own.
    kind: str
    #: What happened, for people.
    text: str
    #: The number of the event that caused it, and the component of that event.
    cause_id: int | None
    cause_component: str | None
    #: The causes as text, the nearest first; kept also when the causing event was dropped.
    because: tuple[str, ...]
    #: Further data.
    data: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain data for JSON; other values appear as their repr."""
        return {**self._asdict(), "because": list(self.because), "data": plain(self.data)}

    def __hash__(self) -> int:
        return hash((self.id, self.component))

    def __repr__(self) -> str:
        return f"<Event {self.id} {self.component} {self.kind}: {self.text}>"


class RecorderStatistics(NamedTuple):
    """How many events a recorder keeps, and how many it dropped because it was full."""

    #: Events recorded so far.
    recorded: int
    #: Events that can still be read.
    kept: int
    #: Events dropped because of `size`, `max_components` or `max_events`.
    dropped: int
    #: Components that have events.
    components: int
    #: Components dropped because of `max_components`, the least recently changed first.
    dropped_components: int
    #: Subscribed sinks.
    sinks: int
    #: Exceptions raised by sinks.
    sink_errors: int


#: The cause of an event: another event, an error, or a text.
Cause: TypeAlias = Event | BaseException | str
Sink: TypeAlias = Callable[[Event], None]
_NO_DATA: Mapping[str, Any] = MappingProxyType({})
_make: Callable[..., Event] = tuple.__new__


class Recorder:
    """Keeps the newest events of each component and explains them.

    `size` is the number of events kept for each component. `max_components` limits the number of
    components, which may be unbounded (one per account, for example); above it, the least recently
    changed component is dropped, and counted. `max_events` limits the number of all events: above
    it, half of them are kept, an equal share for each component.
    """

    def __init__(
        self,
        size: int = 256,
        *,
        max_components: int = 10_000,
        max_events: int = 20_000,
        clock: Clock | None = None,
    ) -> None:
        checks = [("size", size), ("max_components", max_components), ("max_events", max_events)]
        refuse("Recorder", unmet(*((*check, check[1] >= 1, "at least 1") for check in checks)))
        self._size = size
        self._max_components = max_components
        self._max_events = max_events
        self._fixed_clock = clock
        self._clock_of: tuple[AbstractEventLoop | None, Clock] = (None, Clock.system())
        # Lists, cut from time to time to the newest `size` events: most components have few events,
        # and an empty deque takes 600 bytes.
        self._rings: OrderedDict[str, list[Event]] = OrderedDict()
        self._cut_at = size + size // 8
        self._ids = itertools.count(1)
        self._newest = 0
        self._forgotten = 0
        self._held = 0  # events in all rings
        self._dropped_components = 0
        self._sinks: Observers[Event] = Observers("a recorder")

    def record(
        self,
        component: str,
        text: str,
        /,
        *,
        kind: str = "info",
        cause: Cause | None = None,
        **data: Any,
    ) -> Event:
        """Record an event; returns it, so that it can be the cause of a later one.

        An exception passed as the cause is stored as text, so that the recorder keeps no traceback
        and no frames alive.
        """
        return self._note(component, text, kind, cause, data or _NO_DATA)

    def _note(
        self, component: str, text: str, kind: str, cause: Cause | None, data: Mapping[str, Any]
    ) -> Event:
        """Record an event with a mapping that many events share, and that must not change."""
        clock = self._fixed_clock or self._current_clock()
        cause_id = cause_component = None
        because: tuple[str, ...] = ()
        if cause is not None and cause != "":
            cause_id, cause_component, because = _link(cause)
        self._newest = number = next(self._ids)
        event = _make(
            Event,
            (
                number,
                clock.monotonic(),
                clock.wall(),
                component,
                kind,
                text,
                cause_id,
                cause_component,
                because,
                data,
            ),
        )
        try:
            self._rings.move_to_end(component)
            ring = self._rings[component]
        except KeyError:
            ring = self._open(component)
        ring.append(event)
        self._held += 1
        if len(ring) > self._cut_at:
            self._held -= len(ring) - self._size
            del ring[: -self._size]
        if self._held > self._max_events:
            self._trim()
        if self._sinks.callbacks:
            self._sinks.deliver(event)
        return event

    def events(self, component: str | None = None, limit: int | None = None) -> list[Event]:
        """Return the events of one component, or of all, the oldest first; at most the `limit`
        newest."""
        if component is None:
            found = [event for ring in list(self._rings.values()) for event in self._kept(ring)]
            found.sort(key=lambda event: event.id)
        else:
            found = self._kept(self._rings.get(component, []))
        return found if limit is None else found[max(len(found) - limit, 0) :]

    def cause(self, event: Event) -> Event | None:
        """Return the event that caused this one, or None if it is no longer kept."""
        if event.cause_component is None:
            return None
        for candidate in self._kept(self._rings.get(event.cause_component, [])):
            # The text is compared too: the cause may be an event of another recorder.
            if candidate.id == event.cause_id and candidate.text == event.because[0]:
                return candidate
        return None

    def components(self) -> tuple[str, ...]:
        """Return the components that have events, the least recently changed first."""
        return tuple(self._rings)

    def explain(self, component: str) -> str:
        """Return the newest state of the component and its causes, as text."""
        clock = self._fixed_clock or self._current_clock()
        return explain(self, component, clock)

    def forget(self, component: str) -> None:
        """Remove all events of a component that no longer exists."""
        if (ring := self._rings.pop(component, None)) is not None:
            self._forgotten += len(self._kept(ring))
            self._held -= len(ring)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call the sink with each new event, in the recording thread; returns a function that
        unsubscribes it.

        An exception of a sink is counted each time and logged the first time.
        """
        return self._sinks.add(sink)

    def statistics(self) -> RecorderStatistics:
        """Return how many events are kept, and how many were dropped."""
        rings = list(self._rings.values())
        kept = sum(min(len(ring), self._size) for ring in rings)
        return RecorderStatistics(
            recorded=self._newest,
            kept=kept,
            dropped=self._newest - kept - self._forgotten,
            components=len(rings),
            dropped_components=self._dropped_components,
            sinks=len(self._sinks.callbacks),
            sink_errors=self._sinks.errors,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Recorder: {now.kept} events of {now.components} components, {now.dropped} dropped>"
        )

    def _current_clock(self) -> Clock:
        # Making a clock costs as much as recording, so the last loop's clock is cached.
        loop = _get_running_loop()
        known, clock = self._clock_of
        if known is loop:
            return clock
        clock = Clock.current()
        if getattr(loop, "clock", None) is None:
            # Not that of a simulated loop, which may have one clock for each simulated host.
            self._clock_of = (loop, clock)
        return clock

    def _kept(self, ring: list[Event]) -> list[Event]:
        return ring[-self._size :]

    def _trim(self) -> None:
        """Keep at most half of `max_events`, an equal share for each component."""
        rings = list(self._rings.values())
        share = max(1, self._max_events // 2 // len(rings))
        for ring in rings:
            del ring[:-share]
        self._held = sum(map(len, rings))

    def _open(self, component: str) -> list[Event]:
        ring = self._rings.setdefault(component, [])
        while len(self._rings) > self._max_components:
            self._held -= len(self._rings.popitem(last=False)[1])
            self._dropped_components += 1
        return ring


def in_words(cause: Cause) -> str:
    """Return a cause as one line of text."""
    if isinstance(cause, Event):
        return cause.text
    return describe(cause) if isinstance(cause, BaseException) else cause


def _link(cause: Cause) -> tuple[int | None, str | None, tuple[str, ...]]:
    if isinstance(cause, Event):
        return cause.id, cause.component, (cause.text,)
    if isinstance(cause, BaseException):
        return None, None, causes_of(cause)
    return None, None, (cause,)
