"""The progress of one consumer: delivered and acknowledged transactions."""

from __future__ import annotations

from collections import deque

__all__ = ["Progress"]


class Progress:
    """The acknowledgements of one consumer, in any order; only a prefix without gaps counts."""

    __slots__ = ("_open", "_pending", "acknowledged", "delivered", "seen")

    def __init__(self, acknowledged: int, delivered: int = 0) -> None:
        #: Every transaction that ends here or before is acknowledged.
        self.acknowledged = acknowledged
        #: The end of the last one of them that was delivered; 0 if unknown. Later ones did not
        #: concern the consumer.
        self.delivered = delivered
        #: The end of the last transaction that was delivered, or did not concern the consumer.
        self.seen = acknowledged
        # The ends of delivered transactions, and, negative, of those that did not concern it.
        self._pending: deque[int] = deque()
        self._open: set[int] = set()

    def given(self, end: int) -> bool:
        """Record the delivery of a transaction; return False if it was delivered before."""
        if end <= self.seen:
            return False
        self.seen = end
        self._pending.append(end)
        self._open.add(end)
        return True

    def passed(self, end: int) -> None:
        """Advance to this LSN: no transaction up to here concerns the consumer."""
        if end <= self.seen:
            return
        self.seen = end
        if not self._pending:
            self.acknowledged = end
        elif self._pending[-1] < 0:
            self._pending[-1] = -end
        else:
            self._pending.append(-end)

    def ack(self, end: int) -> bool:
        """Acknowledge the transaction that ends here; return whether the prefix has grown."""
        self._open.discard(end)
        return self._advance()

    def reached(self, end: int, delivered: int) -> None:
        """Take over the acknowledgements of another process under the same name.

        Later transactions that were delivered to this consumer stay outstanding.
        """
        if end <= self.acknowledged:
            return
        while self._pending and abs(self._pending[0]) <= end:
            self._open.discard(self._pending.popleft())
        self.acknowledged = end
        self.delivered = max(self.delivered, delivered)
        self.seen = max(self.seen, end)
        self._advance()

    def _advance(self) -> bool:
        before = self.acknowledged
        while self._pending and self._pending[0] not in self._open:
            place = self._pending.popleft()
            self.acknowledged = abs(place)
            if place > 0:
                self.delivered = place
        return self.acknowledged > before

    def rewind(self) -> None:
        """Forget unacknowledged deliveries: they are delivered again."""
        self.seen = self.acknowledged
        self._pending.clear()
        self._open.clear()

    @property
    def outstanding(self) -> int:
        """The number of delivered and unacknowledged transactions."""
        return len(self._open)
