"""How far the stream was received, and how far the server may forget.

Both are last bytes, as in the protocol's own words ("the last byte flushed, + 1"). That matters: a
commit record may begin exactly where the last one ended, and a server that is told one byte too
much never sends it again.

Invariants:

- `flushed` never passes the end of a transaction that somebody has not acknowledged;
- neither of the two ever goes back;
- when all that was seen is acknowledged, a keepalive moves both, so that a quiet database does not
  keep its log for us.
"""

from __future__ import annotations

from ..decode import PrimaryKeepalive, status_update

__all__ = ["Positions"]


class Positions:
    """The three places that a stream keeps: received, flushed, and the last transaction's end."""

    __slots__ = ("flushed", "last_seen", "received")

    def __init__(self, confirmed: int) -> None:
        """The slot is confirmed up to this place: everything before it is safe."""
        self.received = confirmed - 1
        self.flushed = confirmed - 1
        #: The end of the last transaction that was received.
        self.last_seen = confirmed

    @property
    def up_to_date(self) -> bool:
        """Whether all that was seen is safe."""
        return self.flushed + 1 >= self.last_seen

    def committed(self, end: int) -> None:
        """A transaction that ends here was received."""
        self.received = max(self.received, end - 1)
        self.last_seen = max(self.last_seen, end)

    def acknowledged(self, end: int) -> bool:
        """All transactions up to this place are safe; returns whether that is news."""
        if end - 1 <= self.flushed:
            return False
        self.flushed = end - 1
        return True

    def keepalive(self, keepalive: PrimaryKeepalive, *, inside: bool) -> bool:
        """The server gave a sign of life; returns whether to answer now.

        Within a transaction the numbers stay as they are: its end is not known to be safe.
        """
        if inside:
            return keepalive.reply
        self.received = max(self.received, keepalive.end - 1)
        # Not only when this is news: it may have been told before the last acknowledgement.
        moved = self.up_to_date and keepalive.end - 1 > self.flushed
        if moved:
            self.flushed = keepalive.end - 1
            self.last_seen = keepalive.end
        return keepalive.reply or moved

    def status(self, wall: float, *, reply: bool = False) -> bytes:
        """The status update to send to the server; `reply` asks for a keepalive."""
        return status_update(self.received, self.flushed, wall, reply=reply)
