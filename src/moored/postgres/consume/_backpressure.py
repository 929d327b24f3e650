"""Back-pressure: reading is paused while too much is queued for a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moored.kernel import Clock

from ._consumer import Changes

__all__ = ["Backpressure"]

#: With more than this queued for a consumer, in bytes or in transactions, reading is paused.
QUEUE_BYTES = 64 * 2**20
QUEUE_LENGTH = 10_000
#: A consumer that takes nothing for so many seconds, while all others wait for it, is hung.
STALLED_AFTER = 10.0


class Backpressure:
    """Whether reading is paused for a consumer, and since when.

    :param consumers: returns the consumers that are attached.
    """

    def __init__(self, consumers: Callable[[], list[Changes]], clock: Clock) -> None:
        self._consumers = consumers
        self._clock = clock
        self.queue_bytes = QUEUE_BYTES
        self.queue_length = QUEUE_LENGTH
        self._room = asyncio.Event()
        self._room.set()
        #: Whether reading is paused.
        self.full = False
        self._full_since = 0.0
        #: Called when reading is paused, and when it goes on.
        self.on_change: Callable[[], None] = lambda: None

    def is_full(self, changes: Changes) -> bool:
        """Whether too much is queued for this consumer."""
        return changes._bytes > self.queue_bytes or len(changes._queue) > self.queue_length

    def queued(self, changes: Changes) -> None:
        """Pause reading if too much is queued for this consumer now."""
        if not self.full and self.is_full(changes):
            self.full, self._full_since = True, self._clock.monotonic()
            self._room.clear()
            self.on_change()

    def taken(self) -> None:
        """Go on reading if no consumer has too much queued any more."""
        if self.full and not any(map(self.is_full, self._consumers())):
            self.full = False
            self._room.set()
            self.on_change()

    async def room(self) -> None:
        """Wait until reading goes on."""
        await self._room.wait()

    @property
    def stalled(self) -> bool:
        """Whether a consumer that takes nothing has stopped the others for too long."""
        return self.full and self._clock.monotonic() - self._full_since >= STALLED_AFTER
