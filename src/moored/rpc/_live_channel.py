"""One generation: a connected channel, and the number of its calls in flight.

Calls are counted without a lock: appending to a list and popping from it are atomic. A thread that
replaces the generation does so first and reads the count afterwards; a caller counts its call
first, and checks afterwards that the generation is still current. So one of the two always sees the
other, and a channel is never closed under a call that has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LiveChannel"]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class LiveChannel:
    """A channel of one generation."""

    number: int
    #: The inner channel: of grpc, or of grpc.aio.
    channel: Any
    address: str
    #: Its length is the number of calls in flight.
    calls: list[None] = field(default_factory=list)
    #: Whether no new call begins over it; the channel is closed after its last call.
    retired: bool = False
    #: Whether the channel is closed, or is being closed.
    closed: bool = False
    #: Called after each call that ends, while the last one is awaited.
    watcher: Callable[[LiveChannel], None] | None = None
    #: The done callback of its `grpc.aio` calls.
    ended: Callable[[Any], None] | None = None

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
