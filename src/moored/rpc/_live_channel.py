"""One generation: a channel that is connected, and the calls that are under way over it.

A call is counted before it begins and after it has ended, without a lock: appending to a list and
popping from it are atomic. Whoever replaces the generation does so first and looks at the count
afterwards; whoever calls counts first, and looks afterwards whether it is still the current one.
So one of the two always sees the other, and a channel is never closed under a call that began.
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
        #: Its length is the number of calls under way.
        self.calls: list[None] = []
        #: No call begins over it any more; when the last one has ended, the channel is closed.
        self.retired = False
        #: The channel is closed, or is being closed.
        self.closed = False
        #: A fork has waited for its calls in vain.
        self.endless = False
        #: Told after each call that ends, while somebody waits for the last one.
        self.watcher: Callable[[LiveChannel], None] | None = None
        #: What a call of grpc.aio tells when it is over.
        self.ended: Callable[[Any], None] | None = None

    def leave(self) -> None:
        """A call has ended."""
        self.calls.pop()
        self.tell_watcher()

    def tell_watcher(self) -> None:
        """Report to the watcher that a call has ended."""
        if self.watcher is not None:
            self.watcher(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "retired" if self.retired else "current"
        return f"<LiveChannel {self.number} to {self.address}: {state}, {len(self.calls)} calls>"
