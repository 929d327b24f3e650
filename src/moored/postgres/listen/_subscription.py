"""A bounded queue of events for one subscriber."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

from moored.kernel import Clock

from ._events import Gap, Notification, check_channels

if TYPE_CHECKING:
    from ._listener import Listener

__all__ = ["Subscription"]


class Subscription:
    """The events of some channels, from `Listener.subscribe()`: `async with`, then `async for`.

    The iteration ends when the listener is closed, after the buffered events.
    """

    def __init__(self, listener: Listener, channels: tuple[str, ...], buffer: int) -> None:
        check_channels(channels)
        #: The channels of this subscription.
        self.channels = frozenset(channels)
        self.buffer = buffer
        #: A gap to be reported once the channels are listened to (again); set by the core.
        self.gap: Gap | None = None
        #: Notifications that were dropped because the buffer was full.
        self.dropped = 0
        self._listener = listener
        self._events: deque[Notification | Gap] = deque()
        self._filled = asyncio.Event()
        #: Whether the iteration ends after the buffered events.
        self.ended = False
        self._error: Exception | None = None

    async def listen(self, *channels: str) -> None:
        """Add channels; while the listener is up, wait until it listens to them."""
        check_channels(channels)
        await self._listener._change(self, self.channels | set(channels))

    async def unlisten(self, *channels: str) -> None:
        """Remove channels; buffered events of them are still delivered."""
        await self._listener._change(self, self.channels - set(channels))

    def offer(self, event: Notification | Gap, clock: Clock) -> None:
        """Append an event; if the buffer is full, drop it and append a `Gap` instead, once."""
        after_gap = bool(self._events) and isinstance(self._events[-1], Gap)
        if isinstance(event, Gap):
            if not after_gap:
                self._events.append(event)
        elif len(self._events) < self.buffer:
            self._events.append(event)
        else:
            self.dropped += 1
            if not after_gap:
                self._events.append(Gap(clock.wall(), "slow"))
        self._filled.set()

    def end(self, error: Exception | None = None) -> None:
        """Let the iteration end after the buffered events, or raise the error."""
        self.ended, self._error = True, error
        self._filled.set()

    async def __aenter__(self) -> Self:
        await self._listener._subscribe(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener._unsubscribe(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notification | Gap:
        while not self._events:
            if self.ended:
                raise self._error or StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()
        return self._events.popleft()

    def __len__(self) -> int:
        """Return the number of buffered events."""
        return len(self._events)

    def __repr__(self) -> str:
        names = ", ".join(sorted(self.channels))
        return f"<Subscription to {names}: {len(self)} of {self.buffer} events buffered>"
