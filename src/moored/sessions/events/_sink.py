"""Where the events of a session go: to whoever is attached, now or later.

There is at most one consumer; another one takes its place. Events that nobody takes wait, up to a
limit; past it the newest are dropped, which is counted and told to the consumer with the next one.
Events with an acknowledgement have that limit for themselves, so that a flood of others costs none.
What has an acknowledgement is acknowledged when the consumer is done with it: a handler when it has
returned, an iterator when it asks for the next one or its block ends, a queue when it has it. What
a handler raises at is set aside: it is not acknowledged, the consumer gets the event
`message_set_aside`, and the events after it are handled.

The end has two parts. Before the goodbye, while the link is there: what is in hand may be finished
and acknowledged; what the server will send to the next session is let go of, and what it will not
is handled as well. After it: the consumer gets the rest. Both together have one moment, and whoever
hangs does not make it longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias

from moored.kernel import awaited, describe, start_task

from .._content import Incoming, SetAside
from ._event_queue import Done, EventQueue, QueuedEvent
from ._event_stream import Leaving

__all__ = ["Handler", "Sink"]

log = logging.getLogger("moored.sessions")

#: How long a consumer has at the end, in seconds.
MOMENT = 5.0

Handler: TypeAlias = Callable[[Incoming], Awaitable[object] | object]
#: The inbound steps: what becomes of an event before a consumer gets it; None for nothing.
Prepare: TypeAlias = Callable[[Incoming], Awaitable[Incoming | None]]


class Sink:
    """The consumer of a session's events, and the queue that it takes them from.

    :param prepare: the inbound steps, which are done for a message before the consumer gets it.
    """

    __slots__ = (
        "_closer",
        "_consumer",
        "_finished",
        "_handler",
        "_prepare",
        "_reader",
        "_until",
        "_waiter",
        "closed",
        "failed",
        "put_aside",
        "queue",
    )

    def __init__(
        self,
        queue: EventQueue,
        prepare: Prepare | None = None,
    ) -> None:
        #: The events that wait.
        self.queue = queue
        #: Times that a handler has raised.
        self.failed = 0
        #: Messages that could not be handled.
        self.put_aside = 0
        self._prepare = prepare
        self._handler: Handler | None = None
        # Who gives events to the handler, while there are any.
        self._consumer: asyncio.Task[None] | None = None
        # Who iterates and has something in hand that is to be acknowledged.
        self._reader: asyncio.Task[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False
        # Whoever waits for the end: it is not waited for.
        self._closer: asyncio.Task[Any] | None = None
        # When the moment is over that consumers have at the end.
        self._until: float | None = None
        # Told when what is in hand at the end is finished.
        self._finished: asyncio.Future[None] | None = None

    # -- events come ---------------------------------------------------------------------------

    def put(
        self,
        event: Incoming,
        done: Done | None = None,
        key: object = None,
        *,
        again: bool = False,
        raw: bool = False,
    ) -> bool:
        """Something happened; says whether there was room for it.

        :param raw: whether it is for the inbound steps, if there are any.
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
        """A message could not be handled: leave it to the server, and report it to the consumer."""
        self.put_aside += 1
        if done is not None:
            done(False)
        self.put(Incoming("message_set_aside", SetAside(event, error), self.queue.profile))

    def link_ready(self, *, again: bool, keeps: bool = True) -> None:
        """There is a new link, over which what was put aside comes again, or does not."""
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

    # -- and go --------------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Incoming] | None) -> None:
        """Give every event to this from now on, and what has waited first; None for nobody."""
        self._leave()
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
                        # Another consumer takes its place, and this event.
                        self._give_back(taken, era)
                        raise
                    self._failed("a handler of events", taken, error)
                else:
                    self.queue.handled(taken, current=self._consumer is task)
                if self._consumer is task:
                    self._finish()
                # The acknowledgement goes out, and others run, also if the handler never waits.
                await asyncio.sleep(0)
        finally:
            if self._consumer is task:
                self._consumer = None

    async def _ready(self, taken: QueuedEvent) -> QueuedEvent | None:
        """Do the inbound steps; None if one of them has dealt with it."""
        assert self._prepare is not None
        event = await self._prepare(taken.event)
        return None if event is None else self.queue.prepared(taken, event)

    def _failed(self, what: str, taken: QueuedEvent, error: BaseException) -> None:
        self.failed += 1
        log.warning(
            "%s of %r has failed with %s: %s is not acknowledged",
            what,
            self.queue.profile,
            describe(error),
            taken.event.type,
            exc_info=error,
        )
        if taken.done is not None or taken.raw:
            self.set_aside(taken.event, error, taken.done)

    async def iterate(self, leaving: Leaving) -> AsyncGenerator[Incoming]:
        """Every event from now on, and what has waited first."""
        self._leave()
        in_hand: tuple[QueuedEvent, int] | None = None
        loop = asyncio.get_running_loop()
        token = self._waiter = loop.create_future()
        try:
            while True:
                await asyncio.sleep(0)  # the last acknowledgement goes out, and others run
                if self._waiter is not token:
                    return
                if (taken := self.queue.take()) is not None:
                    if taken.done is None and not taken.raw:
                        yield taken.event
                        continue
                    reader = asyncio.current_task()
                    in_hand, self._reader = (taken, self.queue.era), reader
                    try:
                        ready = await self._ready(taken) if taken.raw else taken
                    except (Exception, asyncio.CancelledError) as error:
                        if isinstance(error, asyncio.CancelledError) and _is_cancelled(reader):
                            raise
                        self._failed("an inbound step", taken, error)
                        in_hand = None
                        continue
                    if ready is not None:
                        taken, in_hand = ready, (ready, in_hand[1])
                        yield taken.event
                    in_hand = None
                    self.queue.handled(taken, current=self._waiter is token)
                    if self._waiter is token:
                        self._finish()
                    continue
                if self.closed:
                    return
                if token.done():
                    token = self._waiter = loop.create_future()
                await token
        finally:
            if in_hand is not None and leaving.handled:
                self.queue.handled(in_hand[0], current=self._waiter is token)
                in_hand = None
            if self._waiter is token:
                self._waiter = None
                self._finish()
            if in_hand is not None:
                # Its consumer has left the loop, done with it or not: the next one gets it again.
                self._give_back(*in_hand)

    def _leave(self) -> None:
        """Whoever was attached is not any more."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        consumer, self._consumer = self._consumer, None
        self._handler = self._reader = None
        if consumer is not None:
            consumer.cancel()

    # -- the end -------------------------------------------------------------------------------

    def closes(self, task: asyncio.Task[Any] | None) -> None:
        """This task waits for the end; if it has something in hand, it has asked for it itself."""
        if task is not None and task in (self._consumer, self._reader):
            self._closer = task

    async def finish(self, timeout: float = MOMENT) -> None:
        """Before the goodbye: wait for what is in hand, and for what nobody else will get."""
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
        """Nothing is in hand."""
        self._reader = None
        over = self.queue.refuses or not self.queue
        if over and self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def close(self, timeout: float = MOMENT) -> None:
        """Take no more, and give the consumer what is left of its moment."""
        self.closed = True
        self.queue.refuse()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if (consumer := self._consumer) is not None and consumer is not self._closer:
            now = asyncio.get_running_loop().time()
            left = timeout if self._until is None else max(0.0, self._until - now)
            await asyncio.wait((consumer,), timeout=left)
            consumer.cancel()


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0
