"""A subscriber's stream: first the history after its last event, then live events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ._audience import Item, StreamBuffer
from ._events import HistoryLost, LiveEvent, Skipped, SlowSubscriber, StreamComment
from ._recent import RecentEvents
from ._replays import Page, Replays

__all__ = ["LiveStream"]


class LiveStream:
    """The events of one subscriber; an async iterator, made by `Broker.subscribe`.

    It yields `LiveEvent`, `StreamReset` and `Skipped`. It ends when the broker is drained, and
    raises `SlowSubscriber` if the buffer was full.

    :ivar start: the id to resume after, if the stream ends before its first event; empty if the
        stream was opened with `after`, or if the source has not begun.
    :ivar id: the id to resume after now: that of the last item, or a newer one after which there
        was nothing for this stream.
    """

    def __init__(
        self,
        subscriber: StreamBuffer,
        history: Replays | RecentEvents,
        after: Any,
        start: str,
        id: str,
        *,
        on_replayed: Callable[[int], None],
        on_lost: Callable[[StreamBuffer, str], None],
    ) -> None:
        self.subscriber = subscriber
        self.start = start
        self.id = id
        self._history = history
        self._on_replayed = on_replayed
        self._on_lost = on_lost
        self._after = after
        self._reading: asyncio.Future[Page] | None = None
        self._taken: list[Item] = []

    async def take(self) -> list[Item]:
        """Wait for events and return all that there are; an empty list if the stream has ended."""
        subscriber = self.subscriber
        while True:
            if not subscriber.replaying:
                if found := subscriber.take():
                    return found
            elif not subscriber.end_reason:
                if found := await self._read():
                    return found
                continue
            if subscriber.end_reason:
                return []
            await self._wait()

    async def _wait(self, reading: asyncio.Future[Page] | None = None) -> None:
        """Wait until there is something to take, or the stream has ended, or a read has."""
        ready = asyncio.get_running_loop().create_future()
        self.subscriber.on_ready = wake = _waker(ready)
        if reading is not None:
            reading.add_done_callback(wake)
        try:
            await ready
        finally:
            self.subscriber.on_ready = None
            if reading is not None:
                reading.remove_done_callback(wake)

    async def _read(self) -> list[Item]:
        """Return the next events of the history; go live at its end.

        A read may wait for its turn, or for a server that is down: it goes on while the stream
        sends comments meanwhile.
        """
        subscriber = self.subscriber
        if self._reading is None:
            wanted = self._after, subscriber.tenant, subscriber.channels
            self._reading = self._history.page(*wanted)
        reading = self._reading
        if not reading.done():
            await self._wait(reading)
        if subscriber.end_reason or not subscriber.replaying:
            self.stop_reading()  # a gap of the source has made the history useless
        elif subscriber.comment_due:
            subscriber.comment_due = False
            return [StreamComment()]
        elif reading.done():
            self._reading = None
            try:
                return self._received(reading.result())
            except HistoryLost as error:
                self._on_lost(subscriber, str(error))
        return []

    def stop_reading(self) -> None:
        """Give up the read of the history that this stream waits for."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _received(self, page: Page) -> list[Item]:
        if page.last is None:
            self.subscriber.caught_up(self._after)
            return []
        self._after = page.last
        found: list[Item] = [event for event in page.events if self._may_see(event)]
        self._on_replayed(len(found))
        return found

    def _may_see(self, event: LiveEvent) -> bool:
        who = self.subscriber
        return event.tenant == who.tenant and who.gets(event.channel) and who.may_have(event)

    def __aiter__(self) -> LiveStream:
        return self

    async def __anext__(self) -> Item:
        while self._taken or (taken := await self.take()):
            self._taken = self._taken or taken[::-1]
            item = self._taken.pop()
            if not isinstance(item, Skipped):
                self.id = item.id or self.id
            if not isinstance(item, StreamComment):
                return item
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


def _waker(ready: asyncio.Future[None]) -> Callable[..., None]:
    def wake(*_: object) -> None:
        if not ready.done():
            ready.set_result(None)

    return wake
