"""Delivers the events of a session to its consumer: a handler, a queue or an iterator.

There is at most one consumer; attaching another one replaces it. Without a consumer, events are
queued up to a limit; then the newest are dropped, which is counted and reported to the consumer.
Messages that must be acknowledged have a limit of their own, so that other events cannot displace
them. A message is acknowledged when its handler has returned, when its iterator requests the next
event or its block ends, or when it is in the user's queue. If a handler raises, the message is set
aside: it is not acknowledged, the consumer gets the event `message_set_aside`, and later events are
handled.

The end has two parts. While the link is open, the consumer may finish and acknowledge its current
message; queued messages that the server will send to the next session are dropped, and the others
are handled. After the link is closed, the consumer gets the remaining events. Both parts together
take at most CLOSE_TIMEOUT, also if the consumer hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from moored.kernel import awaited, describe, start_task

from .._content import Incoming, SetAside
from ._event_queue import Done, EventQueue, QueuedEvent
from ._event_stream import StreamState

__all__ = ["Handler", "Sink"]

log = logging.getLogger("moored.sessions")

#: Seconds that a consumer has to finish when the session ends.
CLOSE_TIMEOUT = 5.0

Handler: TypeAlias = Callable[[Incoming], Awaitable[object] | object]
#: Runs the inbound steps for an event; returns None if one of them drops it.
Prepare: TypeAlias = Callable[[Incoming], Awaitable[Incoming | None]]


@dataclass(slots=True, eq=False, repr=False)
class Sink:
    """The consumer of a session's events, and the queue that it takes them from."""

    queue: EventQueue
    # The inbound steps, which run for a message before the consumer gets it.
    _prepare: Prepare | None = None
    #: The number of times that a handler or an inbound step raised.
    failed: int = 0
    #: The number of messages that were set aside.
    put_aside: int = 0
    _handler: Handler | None = None
    # The task that calls the handler, while there are events.
    _consumer: asyncio.Task[None] | None = None
    # The task that iterates, while it has a message to acknowledge.
    _reader: asyncio.Task[Any] | None = None
    # The stream that iterates, and what it waits for.
    _stream: StreamState | None = None
    _waiter: asyncio.Future[None] | None = None
    closed: bool = False
    # The consumer's own task, if it stops the session: `close` must not wait for it.
    _closer: asyncio.Task[Any] | None = None
    # When CLOSE_TIMEOUT expires.
    _until: float | None = None
    # Set when the consumer has finished its current message at the end.
    _finished: asyncio.Future[None] | None = None

    # -- adding events -------------------------------------------------------------------------

    def put(
        self,
        event: Incoming,
        done: Done | None = None,
        key: object = None,
        *,
        again: bool = False,
        raw: bool = False,
    ) -> bool:
        """Queue an event; return False if the queue is full or closed.

        :param raw: whether the inbound steps apply to it, if there are any.
        """
        if self.closed:
            self.queue.dropped += 1
            return False
        raw = raw and self._prepare is not None
        if not self.queue.add(QueuedEvent(event, done, key, again, raw)):
            return False
        self._wake()
        return True

    def set_aside(self, event: Incoming, error: BaseException, done: Done | None) -> None:
        """Skip the acknowledgement of a message, and report it as `message_set_aside`."""
        self.put_aside += 1
        if done is not None:
            done(False)
        self.put(Incoming("message_set_aside", SetAside(event, error), self.queue.profile))

    def link_ready(self, *, again: bool, keeps: bool = True) -> None:
        """Drop or deliver the messages of the last link: a new link is ready."""
        self.queue.link_ready(again=again, keeps=keeps)
        self._wake()

    def _wake(self) -> None:
        if not self.queue:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._handler is not None and self._consumer is None:
            self._consumer = start_task(self._feed(self._handler))

    def _give_back(self, taken: QueuedEvent, era: int) -> None:
        self.queue.put_back(taken, era)
        self._wake()

    # -- delivering events ---------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Incoming] | None) -> None:
        """Replace the consumer by this handler or queue; None for no consumer."""
        self._detach()
        self._handler = handler.put if isinstance(handler, asyncio.Queue) else handler
        self._wake()

    async def _feed(self, handler: Handler) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._consumer is task and (taken := self.queue.take()) is not None:
                era = self.queue.era
                try:
                    ready = await self._ready(taken) if taken.raw else taken
                    if ready is not None:
                        taken = ready
                        await awaited(handler(taken.event))
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        # Another consumer has replaced this one, and gets the event.
                        self._give_back(taken, era)
                        raise
                    self._failed("the event handler", taken, error)
                else:
                    self.queue.handled(taken, current=self._consumer is task)
                if self._consumer is task:
                    self._finish()
                # Write the acknowledgement, and let other tasks run, even if no handler awaits.
                await asyncio.sleep(0)
        finally:
            if self._consumer is task:
                self._consumer = None

    async def _ready(self, taken: QueuedEvent) -> QueuedEvent | None:
        """Run the inbound steps; return None if one of them drops the event."""
        assert self._prepare is not None
        event = await self._prepare(taken.event)
        return None if event is None else self.queue.prepared(taken, event)

    def _failed(self, what: str, taken: QueuedEvent, error: BaseException) -> None:
        self.failed += 1
        log.warning(
            "%s of %r failed with %s: %s is not acknowledged",
            what,
            self.queue.profile,
            describe(error),
            taken.event.type,
            exc_info=error,
        )
        if taken.done is not None or taken.raw:
            self.set_aside(taken.event, error, taken.done)

    async def iterate(self, stream: StreamState) -> AsyncGenerator[Incoming]:
        """Replace the consumer by an iterator over all events, the queued ones first."""
        if not stream.attached:
            self._detach()
            stream.attached, self._stream = True, stream
        in_hand: tuple[QueuedEvent, int] | None = None
        try:
            while True:
                await asyncio.sleep(0)  # write the last acknowledgement, and let other tasks run
                if self._stream is not stream:
                    return
                if (taken := self.queue.take()) is not None:
                    if taken.done is None and not taken.raw:
                        yield taken.event
                        continue
                    reader = asyncio.current_task()
                    assert reader is not None
                    in_hand, self._reader = (taken, self.queue.era), reader
                    try:
                        ready = await self._ready(taken) if taken.raw else taken
                    except (Exception, asyncio.CancelledError) as error:
                        if isinstance(error, asyncio.CancelledError) and reader.cancelling():
                            raise
                        self._failed("an inbound step", taken, error)
                        in_hand = None
                        continue
                    if ready is not None:
                        taken, in_hand = ready, (ready, in_hand[1])
                        yield taken.event
                    in_hand = None
                    self.queue.handled(taken, current=self._stream is stream)
                    if self._stream is stream:
                        self._finish()
                    continue
                if self.closed:
                    return
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            if in_hand is not None and stream.handled:
                self.queue.handled(in_hand[0], current=self._stream is stream)
                in_hand = None
            if self._stream is stream:
                self._finish()
            if in_hand is not None:
                # The consumer has left its loop, perhaps in the middle: the next one gets it again.
                self._give_back(*in_hand)

    def _detach(self) -> None:
        """Detach the consumer."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        consumer, self._consumer = self._consumer, None
        self._handler = self._reader = self._stream = None
        if consumer is not None:
            consumer.cancel()

    # -- the end -------------------------------------------------------------------------------

    def closes(self, task: asyncio.Task[Any] | None) -> None:
        """Note the task that stops the session: if it is the consumer, don't wait for it."""
        if task is not None and task in (self._consumer, self._reader):
            self._closer = task
            self._finish()  # in case `finish` is already waiting for it

    async def finish(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Wait until the consumer has handled the messages that only this session can get."""
        loop = asyncio.get_running_loop()
        if self._until is None:
            self._until = loop.time() + timeout
        self.queue.refuse()
        holder = self._consumer or self._reader
        if holder is None or holder in (self._closer, asyncio.current_task()) or holder.done():
            return
        if self._finished is None:
            self._finished = loop.create_future()
        left = max(0.0, self._until - loop.time())
        ends: set[asyncio.Future[None]] = {self._finished, holder}
        await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _finish(self) -> None:
        """Note that the consumer has finished a message."""
        self._reader = None
        over = self.queue.refuses or not self.queue
        if over and self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Accept no more events, and wait for the consumer, until the timeout of the end."""
        self.closed = True
        self.queue.refuse()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if (consumer := self._consumer) is not None and consumer is not self._closer:
            now = asyncio.get_running_loop().time()
            left = timeout if self._until is None else max(0.0, self._until - now)
            await asyncio.wait((consumer,), timeout=left)
            consumer.cancel()
