"""The positions of a stream: up to where it was received, and up to where it is safe.

Both are last bytes, as the protocol defines them ("the last byte flushed, + 1"). A commit record
may begin exactly where the previous one ended: if one byte too much is confirmed, the server never
sends that commit.

Invariants:

- `flushed` never passes the end of a transaction that some consumer has not acknowledged;
- neither position ever decreases;
- when all received transactions are acknowledged, a keepalive advances both, so that the server
  does not retain WAL for a slot whose tables are quiet.
"""

from __future__ import annotations

from ..decode import PrimaryKeepalive, status_update

__all__ = ["Positions"]


class Positions:
    """The positions of a stream: received, flushed, and the end of the last transaction.

    :param confirmed: the slot's confirmed LSN.
    """

    __slots__ = ("flushed", "last_seen", "received")

    def __init__(self, confirmed: int) -> None:
        self.received = confirmed - 1
        self.flushed = confirmed - 1
        #: The end of the last received transaction.
        self.last_seen = confirmed

    @property
    def up_to_date(self) -> bool:
        """Whether all received transactions are safe."""
        return self.flushed + 1 >= self.last_seen

    def committed(self, end: int) -> None:
        """Record a received transaction that ends here."""
        self.received = max(self.received, end - 1)
        self.last_seen = max(self.last_seen, end)

    def acknowledged(self, end: int) -> bool:
        """Record that all transactions up to here are safe; return whether `flushed` has moved."""
        if end - 1 <= self.flushed:
            return False
        self.flushed = end - 1
        return True

    def keepalive(self, keepalive: PrimaryKeepalive, *, inside: bool) -> bool:
        """Take a keepalive of the server; return whether to send a status update now.

        Within a transaction the positions do not change: its end is not known.
        """
        if inside:
            return keepalive.reply
        self.received = max(self.received, keepalive.end - 1)
        # Also if `received` has not moved: it may have moved before the last acknowledgement.
        moved = self.up_to_date and keepalive.end - 1 > self.flushed
        if moved:
            self.flushed = keepalive.end - 1
            self.last_seen = keepalive.end
        return keepalive.reply or moved

    def status(self, wall: float, *, reply: bool = False) -> bytes:
        """Return the status update for the server; `reply` requests a keepalive."""
        return status_update(self.received, self.flushed, wall, reply=reply)
