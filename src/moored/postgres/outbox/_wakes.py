"""When consumers read: at a notification, and otherwise by the clock."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Protocol

from moored.kernel import Backoff, Child, Clock, Context, describe

from ._cursor import OutboxState, sees

log = logging.getLogger("moored.postgres")

#: Seconds between reads while each publisher's own notification arrives, and otherwise. The stream
#: may lag behind, or the process that has it may be frozen.
POLL, POLL_DOWN = 30.0, 1.0
#: Announced transactions that are remembered while no consumer reads, and the seconds after which
#: one that no reader sees is forgotten: it is of a server that was replaced, or was made up.
ANNOUNCED, INVISIBLE = 1000, 10.0

#: The transactions in the payload of a notification.
_XIDS = re.compile("[0-9]{1,10}(,[0-9]{1,10})*")


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
    """Wakes all consumers of an outbox, at each notification and at each poll.

    :param sources: where wake-ups come from, by name: "stream", "listener".
    :param certain: returns the name of the source that never misses an event while it is up; None
        if there is none, or if it is unknown.
    """

    def __init__(
        self,
        sources: Mapping[str, WakeSource],
        channel: str,
        certain: Callable[[], str | None],
    ) -> None:
        self._sources = sources
        self._channel = channel
        self._certain = certain
        # The names of those that are subscribed to.
        self._subscribed: set[str] = set()
        self._next = asyncio.Event()
        self._last = 0.0
        # The last transactions that the stream has announced, without their epochs, and when each
        # is forgotten if no reader sees it.
        self._announced: deque[tuple[int, float]] = deque(maxlen=ANNOUNCED)
        #: Notifications and gaps so far.
        self.notified = 0

    @property
    def up(self) -> bool:
        """Whether notifications arrive; otherwise consumers read every second."""
        return any(map(self.hears, self._sources))

    def children(self) -> list[Child]:
        """Return what wakes the consumers, as children of a supervisor."""
        listening = [Child(name, partial(self.listen, name)) for name in self._sources]
        return [Child("poll", self.poll), *listening]

    def hears(self, name: str | None) -> bool:
        """Whether the notifications of a source arrive."""
        return name is not None and name in self._subscribed and self._sources[name].up

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
        now = Clock.current().monotonic()
        while self._announced:
            xid, end = self._announced[0]
            if now < end and not sees(snapshot, xid):
                return True
            self._announced.popleft()
        return False

    def _announce(self, item: object) -> None:
        if isinstance(item, int):
            self._announced.append((item, Clock.current().monotonic() + INVISIBLE))
        else:
            self._announced.clear()

    async def listen(self, name: str, ctx: Context) -> None:
        """Wake the consumers at each notification of a source, until the subscription ends."""
        ctx.started()
        source, level = self._sources[name], logging.WARNING
        while True:
            try:
                async with source.subscribe(self._channel) as events:
                    self._subscribed.add(name)
                    level = logging.WARNING
                    # A notification before the subscription is lost.
                    self.wake()
                    async for item in events:
                        if forwarded := _transactions(item):
                            if self.hears("stream"):
                                continue  # it was sent by this process
                            for xid in forwarded:
                                self._announce(xid)
                        elif not hasattr(item, "payload"):  # a gap, and no notification
                            self._announce(item)
                        self.notified += 1
                        self.wake()
            except Exception as error:
                text = "the outbox cannot subscribe to wake-ups; its consumers poll instead: %s"
                log.log(level, text, describe(error))
                level = logging.DEBUG
            finally:
                self._subscribed.discard(name)
            await asyncio.sleep(POLL_DOWN)

    async def poll(self, ctx: Context) -> None:
        """Wake the consumers by the clock; checks once a second whether that is needed."""
        ctx.started()
        while True:
            await asyncio.sleep(POLL_DOWN)
            every = POLL if self.hears(self._certain()) else POLL_DOWN
            if Clock.current().monotonic() - self._last >= every:
                self.wake()


def _transactions(item: object) -> list[int]:
    """Return the transactions that a notification of the process with the stream names."""
    payload = getattr(item, "payload", "")
    return [int(xid) for xid in payload.split(",")] if _XIDS.fullmatch(payload) else []
