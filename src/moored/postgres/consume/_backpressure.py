"""Back-pressure: pause reading while the queue of a consumer is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moored.kernel import Clock

from ._consumer import Changes

__all__ = ["Backpressure"]

#: A consumer's queue is full with more bytes, or more transactions, than this.
QUEUE_BYTES = 64 * 2**20
QUEUE_LENGTH = 10_000
#: After so many seconds with a full queue, the health is `DEGRADED`.
STALLED_AFTER = 10.0


class Backpressure:
    """Whether reading is paused, and since when.

    :param consumers: returns the attached consumers.
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
        #: Called when reading is paused, and when it resumes.
        self.on_change: Callable[[], None] = lambda: None

    def is_full(self, changes: Changes) -> bool:
        """Return whether the queue of this consumer is full."""
        return changes._bytes > self.queue_bytes or len(changes._queue) > self.queue_length

    def queued(self, changes: Changes) -> None:
        """Pause reading if the queue of this consumer is full."""
        if not self.full and self.is_full(changes):
            self.full, self._full_since = True, self._clock.monotonic()
            self._room.clear()
            self.on_change()

    def taken(self) -> None:
        """Resume reading if no queue is full."""
        if self.full and not any(map(self.is_full, self._consumers())):
            self.full = False
            self._room.set()
            self.on_change()

    async def room(self) -> None:
        """Wait until reading may resume."""
        await self._room.wait()

    @property
    def stalled(self) -> bool:
        """Whether a full queue has stopped all consumers for `STALLED_AFTER` seconds."""
        return self.full and self._clock.monotonic() - self._full_since >= STALLED_AFTER
