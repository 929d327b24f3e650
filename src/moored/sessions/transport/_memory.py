"""A connection within one process: two transports that deliver to each other on the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from ._transport import Receiver

__all__ = ["MemoryEnd", "memory_pair"]


@dataclass(slots=True, eq=False, repr=False)
class MemoryEnd:
    """One end; written bytes reach the other end in a later turn of the loop, in order."""

    _loop: asyncio.AbstractEventLoop
    _context: Context
    peer: MemoryEnd = field(init=False)
    receiver: Receiver | None = None
    # Written, and not delivered to the other end yet.
    _queue: deque[bytes] = field(default_factory=deque)
    #: The number of bytes that are not delivered yet.
    pending: int = 0
    _scheduled: bool = False
    # Closed, aborted or lost: nothing more is written or received.
    _leaving: bool = False
    _over: bool = False
    _error: BaseException | None = None

    keeps_bounds = False

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._leaving:
            return
        self._queue.append(data)
        self.pending += len(data)
        self._schedule()

    def close(self) -> None:
        """Deliver the pending bytes, then close both ends."""
        if not self._leaving:
            self._leaving = True
            self._schedule()

    def abort(self) -> None:
        """Close both ends, and drop the pending bytes."""
        self._break(None)

    def _break(self, error: BaseException | None) -> None:
        self._leaving = True
        self._error = self._error or error
        self._queue.clear()
        self.pending = 0
        if self.peer._error is None and not self.peer._leaving:
            self.peer._error = ConnectionResetError("the peer has aborted the connection")
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._over:
            self._scheduled = True
            self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        self._scheduled = False
        peer = self.peer
        while self._queue:
            data = self._queue.popleft()
            self.pending -= len(data)
            peer._take(data)
        if self._leaving:
            try:
                self._end()
            finally:
                peer._end()

    def _take(self, data: bytes) -> None:
        if self._leaving or self.receiver is None:
            return
        try:
            self.receiver.received(data)
        except Exception as error:
            self._break(error)

    def _end(self) -> None:
        """Report the end to the receiver, once."""
        self._leaving = self._over = True
        self._queue.clear()
        self.pending = 0
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.lost(self._error)


def memory_pair() -> tuple[MemoryEnd, MemoryEnd]:
    """Return two connected ends; set their receivers before the next turn of the loop."""
    loop, context = asyncio.get_running_loop(), copy_context()
    near, far = MemoryEnd(loop, context), MemoryEnd(loop, context)
    near.peer, far.peer = far, near
    return near, far
