"""One generation: a connected channel, and the number of its calls in flight.

Calls are counted without a lock: appending to a list and popping from it are atomic. A thread that
replaces the generation does so first and reads the count afterwards; a caller counts its call
first, and checks afterwards that the generation is still current. So one of the two always sees the
other, and a channel is never closed under a call that has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LiveChannel"]


class LiveChannel:
    """A channel of one generation."""

    __slots__ = (
        "__weakref__",
        "address",
        "calls",
        "channel",
        "closed",
        "ended",
        "endless",
        "number",
        "retired",
        "watcher",
    )

    def __init__(self, number: int, channel: Any, address: str) -> None:
        self.number = number
        #: The inner channel: of grpc, or of grpc.aio.
        self.channel = channel
        self.address = address
        #: Its length is the number of calls in flight.
        self.calls: list[None] = []
        #: Whether no new call begins over it; the channel is closed after its last call.
        self.retired = False
        #: Whether the channel is closed, or is being closed.
        self.closed = False
        #: Whether its calls did not end before an earlier fork.
        self.endless = False
        #: Called after each call that ends, while the last one is awaited.
        self.watcher: Callable[[LiveChannel], None] | None = None
        #: The done callback of its `grpc.aio` calls.
        self.ended: Callable[[Any], None] | None = None

    def leave(self) -> None:
        """Count a call that has ended."""
        self.calls.pop()
        self.tell_watcher()

    def tell_watcher(self) -> None:
        """Report to the watcher that a call has ended."""
        if self.watcher is not None:
            self.watcher(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "retired" if self.retired else "current"
        return f"<LiveChannel {self.number} to {self.address}: {state}, {len(self.calls)} calls>"
