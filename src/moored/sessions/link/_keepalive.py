"""Keepalive of one link: when to ping the server, and when the link counts as lost. No I/O.

A ping is due when nothing was received, or nothing was sent, for the protocol's keepalive interval,
less up to a tenth, so that a thousand links do not ping together. While the send buffer shrinks,
the server is alive and has not received the ping yet.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Keepalive", "KeepaliveStep"]


class KeepaliveStep(Enum):
    """What to do now."""

    WAIT = "wait"
    PING = "ping"
    LOST = "lost"


class Keepalive:
    """The keepalive of one link.

    :param every: seconds of silence after which to ping.
    :param patience: seconds that the server has to answer a ping.
    """

    __slots__ = ("_every", "_patience", "_pending", "_pinged_at", "received_at", "sent_at")

    def __init__(self, every: float, patience: float, now: float) -> None:
        self._every = every
        self._patience = patience
        self._pinged_at: float | None = None
        # The size of the send buffer at that time.
        self._pending = 0
        #: When bytes were last received, and last sent.
        self.received_at = now
        self.sent_at = now

    def check(self, now: float, pending: int = 0) -> tuple[KeepaliveStep, float]:
        """Return what to do now, and when to check again.

        :param pending: the number of bytes in the send buffer.
        """
        if self._pinged_at is not None and self.received_at >= self._pinged_at:
            self._pinged_at = None
        if self._pinged_at is None:
            due = min(self.received_at, self.sent_at) + self._every
            if now < due:
                return KeepaliveStep.WAIT, due
            self._pinged_at, self._pending = now, pending
        else:
            if now >= self._pinged_at + self._patience:
                if pending >= self._pending:
                    return KeepaliveStep.LOST, now
                self._pinged_at, self._pending = now, pending
            # The patience may exceed the interval: the server expects another ping meanwhile.
            due = self.sent_at + self._every
            if now < due:
                return KeepaliveStep.WAIT, min(due, self._pinged_at + self._patience)
        self.sent_at = now
        return KeepaliveStep.PING, min(now + self._every, self._pinged_at + self._patience)
