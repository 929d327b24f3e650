"""Who has published to an outbox: the stream announces it, for this process and for others."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..decode import Committed

__all__ = ["Published"]

#: The transactions that one notification names at most: its payload has less than 8,000 bytes.
NAMED = 500


class Published:
    """The transactions that have published, as the stream shows them.

    Outboxes of this process subscribe. For those of others, each batch is sent as one notification.
    """

    def __init__(self) -> None:
        self._subscribers: defaultdict[str, list[Callable[[int], object]]] = defaultdict(list)
        self._unsent: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=NAMED))
        self._arrived = asyncio.Event()

    def add(self, transaction: Committed) -> None:
        """Announce a transaction to the channels of its outboxes."""
        for channel in transaction.wakes:
            for subscriber in list(self._subscribers.get(channel, ())):
                subscriber(transaction.xid)
            self._unsent[channel].append(transaction.xid)
        self._arrived.set()

    @contextmanager
    def subscribed(self, channel: str, subscriber: Callable[[int], object]) -> Iterator[None]:
        """Call a function with the ID of each transaction that publishes to a channel."""
        self._subscribers[channel].append(subscriber)
        try:
            yield
        finally:
            self._subscribers[channel].remove(subscriber)

    async def unsent(self) -> dict[str, str]:
        """Wait for transactions that no notification has named; return their IDs by channel."""
        await self._arrived.wait()
        self._arrived.clear()
        found = {channel: ",".join(map(str, xids)) for channel, xids in self._unsent.items()}
        self._unsent.clear()
        return found
