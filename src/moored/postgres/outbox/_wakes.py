"""When consumers read: at a notification, and otherwise by the clock."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

from moored.kernel import Backoff, Clock, Context, describe

from ._cursor import OutboxState, sees

log = logging.getLogger("moored.postgres")

#: Seconds between reads while notifications arrive, and while there is no listener, or it is down.
POLL, POLL_DOWN = 30.0, 1.0
#: Announced transactions that are remembered while no consumer reads.
ANNOUNCED = 1000


class WakeSource(Protocol):
    """A source of notifications, such as a `Listener`."""

    @property
    def up(self) -> bool:
        """Whether notifications arrive at present."""
        ...

    def subscribe(self, channel: str, /) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
        """Subscribe to a channel of NOTIFY; every event, also of a gap, wakes the consumers."""
        ...


class Wakes:
    """Wakes all consumers of an outbox, at each notification and at each poll."""

    def __init__(self, source: WakeSource | None, channel: str) -> None:
        self._source = source
        self._channel = channel
        self._subscribed = False
        self._next = asyncio.Event()
        self._last = 0.0
        # The last transactions that the stream has announced, without their epochs, until a reader
        # sees them.
        self._announced: deque[int] = deque(maxlen=ANNOUNCED)
        #: Notifications and gaps so far.
        self.notified = 0

    @property
    def up(self) -> bool:
        """Whether notifications arrive; otherwise consumers read every second."""
        return self._subscribed and self._source is not None and self._source.up

    def next(self) -> asyncio.Event:
        """Return an event that is set at the next wake-up; take it before a read, not after."""
        return self._next

    def wake(self) -> None:
        """Wake every consumer."""
        self._last = Clock.current().monotonic()
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def more(self, woken: asyncio.Event, held: Backoff, server: OutboxState) -> None:
        """Wait until there may be more events than on a page that had none."""
        # A transaction that holds events back may end without a notification.
        waits = server.held or self.may_be_invisible(server.snapshot)
        if not waits:
            held.succeed()
        with suppress(TimeoutError):
            async with asyncio.timeout(held.fail() if waits else None):
                await woken.wait()

    def may_be_invisible(self, snapshot: str) -> bool:
        """Whether a transaction that was announced had not ended in a snapshot.

        The change stream has a transaction as soon as its commit is in the WAL; readers see it a
        moment later, or when a synchronous standby has it, too.
        """
        while self._announced and sees(snapshot, self._announced[0]):
            self._announced.popleft()
        return bool(self._announced)

    def _announce(self, item: object) -> None:
        if isinstance(item, int):
            self._announced.append(item)
        else:
            self._announced.clear()

    async def listen(self, ctx: Context) -> None:
        """Wake the consumers at each notification, until the subscription ends."""
        ctx.started()
        level = logging.WARNING
        while self._source is not None:
            try:
                async with self._source.subscribe(self._channel) as events:
                    self._subscribed, level = True, logging.WARNING
                    # A notification before the subscription is lost.
                    self.wake()
                    async for item in events:
                        self._announce(item)
                        self.notified += 1
                        self.wake()
            except Exception as error:
                text = "the outbox cannot subscribe to wake-ups; its consumers poll instead: %s"
                log.log(level, text, describe(error))
                level = logging.DEBUG
            finally:
                self._subscribed = False
            await asyncio.sleep(POLL_DOWN)
        await asyncio.Event().wait()

    async def poll(self, ctx: Context) -> None:
        """Wake the consumers by the clock; checks once a second whether notifications arrive."""
        ctx.started()
        while True:
            await asyncio.sleep(POLL_DOWN)
            if Clock.current().monotonic() - self._last >= (POLL if self.up else POLL_DOWN):
                self.wake()
