"""Where the events of a session go: to whoever is attached, now or later.

There is at most one consumer; another one takes its place. Events that nobody takes wait, up to a
limit; past it the newest are dropped, which is counted and told to the consumer with the next one.
Events with an acknowledgement have that limit for themselves, so that a flood of others costs none.
What has an acknowledgement is acknowledged when the consumer is done with it: a handler when it has
returned, an iterator when it asks for the next one, a queue when it has it.

The end has two parts. Before the goodbye, while the link is there: what is in hand may be finished
and acknowledged; what the server will send to the next session is let go of, and what it will not
is handled as well. After it: the consumer gets the rest. Both together have one moment, and whoever
hangs does not make it longer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from moored.kernel import describe

from ._content import Event
from ._waiting import Done, Taken, Waiting

__all__ = ["Handler", "Sink"]

log = logging.getLogger("moored.sessions")

#: How long a consumer has at the end, in seconds.
MOMENT = 5.0

Handler: TypeAlias = Callable[[Event], Awaitable[object] | object]


class Sink(Waiting):
    """The events of one session, and whoever takes them."""

    __slots__ = (
        "_closed",
        "_closer",
        "_consumer",
        "_finished",
        "_handler",
        "_reader",
        "_until",
        "_waiter",
        "failed",
    )

    def __init__(
        self, profile: str, limit: int = 1000, *, returns: bool = False, outlives: bool = False
    ) -> None:
        super().__init__(profile, limit, returns=returns, outlives=outlives)
        #: Times that a handler has raised.
        self.failed = 0
        self._handler: Handler | None = None
        # Who gives events to the handler, while there are any.
        self._consumer: asyncio.Task[None] | None = None
        # Who iterates and has something in hand that is to be acknowledged.
        self._reader: asyncio.Task[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        # Whoever waits for the end: it is not waited for.
        self._closer: asyncio.Task[Any] | None = None
        # When the moment is over that consumers have at the end.
        self._until: float | None = None
        # Told when what is in hand at the end is finished.
        self._finished: asyncio.Future[None] | None = None

    # -- events come ---------------------------------------------------------------------------

    def put(
        self,
        event: Event,
        done: Done | None = None,
        key: object = None,
        *,
        again: bool = False,
    ) -> bool:
        """Something happened; says whether there was room for it."""
        if self._closed:
            self.dropped += 1
            return False
        if not self.add(event, done, key, again=again):
            return False
        self._wake()
        return True

    def link_ready(self, *, again: bool, keeps: bool = True) -> None:
        """There is a new link, over which what was put aside comes again, or does not."""
        super().link_ready(again=again, keeps=keeps)
        self._wake()

    def _wake(self) -> None:
        if not self:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._handler is not None and self._consumer is None:
            self._consumer = asyncio.get_running_loop().create_task(self._feed(self._handler))

    def _give_back(self, taken: Taken, era: int) -> None:
        self.put_back(taken, era)
        self._wake()

    # -- and go --------------------------------------------------------------------------------

    def attach(self, handler: Handler | asyncio.Queue[Event] | None) -> None:
        """Give every event to this from now on, and what has waited first; None for nobody."""
        self._leave()
        self._handler = handler.put if isinstance(handler, asyncio.Queue) else handler
        self._wake()

    async def _feed(self, handler: Handler) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._consumer is task and (taken := self.take()) is not None:
                event, era = taken.event, self._era
                try:
                    outcome = handler(event)
                    if inspect.isawaitable(outcome):
                        await outcome
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        # Another consumer takes its place, and this event.
                        self._give_back(taken, era)
                        raise
                    self.failed += 1
                    log.warning(
                        "a handler of events of %r has failed with %s: %s is not acknowledged",
                        self._profile,
                        describe(error),
                        event.type,
                        exc_info=True,
                    )
                    if taken.done is not None:
                        taken.done(False)
                else:
                    self.handled(taken, current=self._consumer is task)
                if self._consumer is task:
                    self._finish()
        finally:
            if self._consumer is task:
                self._consumer = None

    async def iterate(self) -> AsyncIterator[Event]:
        """Every event from now on, and what has waited first."""
        self._leave()
        in_hand: tuple[Taken, int] | None = None
        loop = asyncio.get_running_loop()
        token = self._waiter = loop.create_future()
        try:
            while self._waiter is token:
                if (taken := self.take()) is not None:
                    if taken.done is None:
                        yield taken.event
                        continue
                    in_hand, self._reader = (taken, self._era), asyncio.current_task()
                    yield taken.event
                    in_hand = None
                    self.handled(taken, current=self._waiter is token)
                    if self._waiter is token:
                        self._finish()
                    continue
                if self._closed:
                    return
                if token.done():
                    token = self._waiter = loop.create_future()
                await token
        finally:
            if self._waiter is token:
                self._waiter = None
                self._finish()
            if in_hand is not None:
                # Whoever had it has left the loop, done with it or not: the next one gets it again.
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
        self.refuse()
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
        over = self._refuses or not self
        if over and self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def close(self, timeout: float = MOMENT) -> None:
        """Take no more, and give the consumer what is left of its moment."""
        self._closed = True
        self.refuse()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if (consumer := self._consumer) is not None and consumer is not self._closer:
            now = asyncio.get_running_loop().time()
            left = timeout if self._until is None else max(0.0, self._until - now)
            await asyncio.wait((consumer,), timeout=left)
            consumer.cancel()
