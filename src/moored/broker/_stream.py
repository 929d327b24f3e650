"""A subscriber's stream: first the history after its last event, then live events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ._audience import Item, StreamBuffer
from ._events import HistoryLost, LiveEvent, ReplaySource, SlowSubscriber, SourceEvent

__all__ = ["LiveStream"]

#: How many events of the history are read at a time.
PAGE = 500


class LiveStream:
    """The events of one subscriber; an async iterator, made by `Broker.subscribe`.

    It yields `LiveEvent`, `StreamReset` and `Skipped`. It ends when the broker is drained, and
    raises `SlowSubscriber` if the buffer was full.
    """

    def __init__(
        self,
        subscriber: StreamBuffer,
        replay: ReplaySource,
        after: Any,
        *,
        admit: Callable[[SourceEvent], LiveEvent | None],
        on_lost: Callable[[StreamBuffer, str], None],
    ) -> None:
        self.subscriber = subscriber
        #: The number of events that were read from the history.
        self.replayed = 0
        self._replay = replay
        self._admit = admit
        self._on_lost = on_lost
        self._after = after
        self._taken: list[Item] = []

    async def take(self) -> list[Item]:
        """Wait for events and return all that there are; an empty list if the stream has ended."""
        subscriber = self.subscriber
        while True:
            if subscriber.replaying:
                if page := await self._read():
                    return page
                continue
            if found := subscriber.take():
                return found
            if subscriber.end_reason:
                return []
            ready = asyncio.get_running_loop().create_future()
            subscriber.on_ready = _waker(ready)
            try:
                await ready
            finally:
                subscriber.on_ready = None

    async def _read(self) -> list[Item]:
        """Return the next events of the history; go live at its end."""
        subscriber = self.subscriber
        try:
            page = await self._replay.read(
                self._after, subscriber.tenant, subscriber.channels, PAGE
            )
        except HistoryLost as error:
            if subscriber.replaying:
                self._on_lost(subscriber, str(error))
            return []
        if not subscriber.replaying:
            return []  # a gap of the source has made the history useless
        if page:
            self._after = page[-1].position
        if len(page) < PAGE:
            subscriber.caught_up(self._after)
        found = [event for event in map(self._admit, page) if event is not None]
        if any(event.tenant != subscriber.tenant for event in found):
            raise AssertionError("the history has returned an event of another tenant")
        self.replayed += len(found)
        return [*found]

    def __aiter__(self) -> LiveStream:
        return self

    async def __anext__(self) -> Item:
        if not self._taken:
            self._taken = (await self.take())[::-1]
        if self._taken:
            return self._taken.pop()
        if self.subscriber.end_reason == "slow":
            raise SlowSubscriber(
                "the subscriber's buffer was full: read faster, raise buffer=, or choose another "
                "slow= policy; subscribe again with after= the last event's id"
            )
        raise StopAsyncIteration

    def __repr__(self) -> str:
        subscriber = self.subscriber
        state = subscriber.end_reason or ("replaying" if subscriber.replaying else "live")
        return f"<LiveStream of {subscriber.tenant}: {state}, {len(subscriber)} buffered>"


def _waker(ready: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    return wake
