"""Where the events of a session go: to whoever is attached, now or later.

There is at most one consumer; another one takes its place. Events that nobody takes wait, up to a
limit; past it the newest are dropped, which is counted and told to the consumer with the next one.
Events with an acknowledgement have that limit for themselves, so that a flood of others costs none.
What has an acknowledgement is acknowledged when the consumer is done with it: a handler when it has
returned, an iterator when it asks for the next one, a queue when it has it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from holdfast.kernel import describe

from ._content import Event

__all__ = ["Handler", "Sink"]

log = logging.getLogger("holdfast.sessions")

Handler: TypeAlias = Callable[[Event], Awaitable[object] | object]
#: Told whether it was handled.
Done: TypeAlias = Callable[[bool], None]


class Sink:
    """The events of one session."""

    __slots__ = (
        "_buffer",
        "_closed",
        "_closer",
        "_consumer",
        "_earlier",
        "_handler",
        "_owed",
        "_profile",
        "_told",
        "_waiter",
        "dropped",
        "failed",
        "limit",
    )

    def __init__(self, profile: str, limit: int = 1000) -> None:
        self._profile = profile
        self.limit = limit
        #: Events that there was no room for.
        self.dropped = 0
        #: Times that a handler has raised.
        self.failed = 0
        self._told = 0
        # What waits: the older ones, the oldest last, and the newer ones, in their order. (Two
        # lists: each session has an event or two that nobody takes, and a deque takes 600 bytes.)
        self._earlier: list[tuple[Event, Done | None]] = []
        self._buffer: list[tuple[Event, Done | None]] = []
        self._handler: Handler | None = None
        self._consumer: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        # Whoever waits for the end: it is not waited for.
        self._closer: asyncio.Task[None] | None = None
        # How many of those that wait have an acknowledgement.
        self._owed = 0

    # -- events come ---------------------------------------------------------------------------

    def put(self, event: Event, done: Done | None = None) -> bool:
        """Something happened; says whether there was room for it."""
        waiting = len(self) - self._owed if done is None else self._owed
        if waiting >= self.limit or self._closed:
            self.dropped += 1
            return False
        self._owed += done is not None
        self._buffer.append((event, done))
        self._wake()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._handler is not None and self._consumer is None:
            self._consumer = asyncio.get_running_loop().create_task(self._feed(self._handler))

    def _take(self) -> tuple[Event, Done | None] | None:
        if not self:
            return None
        if self.dropped > self._told:
            lost, self._told = self.dropped - self._told, self.dropped
            return Event("events_dropped", lost, self._profile), None
        if not self._earlier:
            self._buffer.reverse()
            self._earlier, self._buffer = self._buffer, []
        taken = self._earlier.pop()
        self._owed -= taken[1] is not None
        return taken

    def _put_back(self, taken: tuple[Event, Done | None]) -> None:
        self._owed += taken[1] is not None
        self._earlier.append(taken)
        self._wake()

    # -- and go --------------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Event] | None) -> None:
        """Give every event to this from now on, and what has waited first; None for nobody."""
        self._leave()
        self._handler = handler.put if isinstance(handler, asyncio.Queue) else handler
        if self._handler is not None and self:
            self._wake()

    async def _feed(self, handler: Handler) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._consumer is task and (taken := self._take()) is not None:
                event, done = taken
                try:
                    outcome = handler(event)
                    if inspect.isawaitable(outcome):
                        await outcome
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        # Another consumer takes its place, and this event.
                        self._put_back(taken)
                        raise
                    self.failed += 1
                    log.warning(
                        "a handler of events has failed with %s: %s is not acknowledged",
                        describe(error),
                        event.type,
                        exc_info=True,
                    )
                    handled = False
                else:
                    handled = True
                if done is not None:
                    done(handled)
        finally:
            if self._consumer is task:
                self._consumer = None

    async def iterate(self) -> AsyncIterator[Event]:
        """Every event from now on, and what has waited first."""
        self._leave()
        in_hand: tuple[Event, Done] | None = None
        loop = asyncio.get_running_loop()
        token = self._waiter = loop.create_future()
        try:
            while self._waiter is token:
                if (taken := self._take()) is not None:
                    event, done = taken
                    in_hand = None if done is None else (event, done)
                    yield event
                    in_hand = None
                    if done is not None:
                        done(True)
                    continue
                if self._closed:
                    return
                if token.done():
                    token = self._waiter = loop.create_future()
                await token
        finally:
            if self._waiter is token:
                self._waiter = None
            if in_hand is not None:
                # Whoever had it has left the loop, done with it or not: the next one gets it again.
                self._put_back(in_hand)

    def _leave(self) -> None:
        """Whoever was attached is not any more."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        consumer, self._consumer = self._consumer, None
        self._handler = None
        if consumer is not None:
            consumer.cancel()

    # -- the end -------------------------------------------------------------------------------

    def closes(self, task: asyncio.Task[Any] | None) -> None:
        """This task waits for the end; if it is the consumer, its handler has asked for it."""
        if task is not None and task is self._consumer:
            self._closer = task

    async def close(self, timeout: float = 5.0) -> None:
        """Take no more, and give the consumer a moment for what has waited."""
        self._closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if (consumer := self._consumer) is not None and consumer is not self._closer:
            await asyncio.wait((consumer,), timeout=timeout)
            consumer.cancel()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._earlier) + len(self._buffer)
