"""How far one consumer is: what it was given, what it has acknowledged, in any order."""

from __future__ import annotations

from collections import deque

__all__ = ["Progress"]


class Progress:
    """The acknowledgements of one consumer.

    They may come in any order; what counts is how far there is no gap.
    """

    __slots__ = ("_open", "_pending", "acknowledged", "delivered", "seen")

    def __init__(self, acknowledged: int, delivered: int = 0) -> None:
        #: Everything that ends here or before is acknowledged.
        self.acknowledged = acknowledged
        #: The end of the last transaction of its own among that; 0 if that is not known. The log
        #: may have gone on since, with nothing that concerned it.
        self.delivered = delivered
        #: The end of the last transaction that was given, or that did not concern it.
        self.seen = acknowledged
        # The ends of what it was given, and, as negative numbers, of what did not concern it.
        self._pending: deque[int] = deque()
        self._open: set[int] = set()

    def given(self, end: int) -> bool:
        """A transaction that ends here is given to it; False if it had that one before."""
        if end <= self.seen:
            return False
        self.seen = end
        self._pending.append(end)
        self._open.add(end)
        return True

    def passed(self, end: int) -> None:
        """The log has gone on to here, and nothing of it concerned this consumer."""
        if end <= self.seen:
            return
        self.seen = end
        if self._pending:
            self._pending.append(-end)
        else:
            self.acknowledged = end

    def ack(self, end: int) -> bool:
        """It is done with the transaction that ends here; returns whether it is further now."""
        self._open.discard(end)
        return self._advance()

    def reached(self, end: int, delivered: int) -> None:
        """Another process, under the same name, has acknowledged everything up to here.

        What it was given beyond that it still has: that does not come again.
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
        """It comes back, perhaps as another process: what it has not acknowledged comes again."""
        self.seen = self.acknowledged
        self._pending.clear()
        self._open.clear()

    @property
    def outstanding(self) -> int:
        """How many transactions it has not acknowledged."""
        return len(self._open)

    def __repr__(self) -> str:
        return f"<Progress: {self.outstanding} outstanding>"
