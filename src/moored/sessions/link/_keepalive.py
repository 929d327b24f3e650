"""Whether the other side still lives: when to ask, and when to give it up.

Pure: it is told the time. A server is asked when it was silent, or when it has heard nothing, for
as long as the protocol says, give or take a tenth, so that a thousand links do not ask together.
As long as it takes what was written before the question, it lives, and has not heard it yet.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Keepalive", "KeepaliveStep"]


class KeepaliveStep(Enum):
    """What to do."""

    WAIT = "wait"
    ASK = "ask for a sign of life"
    LOST = "give it up"


class Keepalive:
    """The watch over one link.

    :param every: seconds of silence after which to ask.
    :param patience: seconds that the other side has to answer.
    """

    __slots__ = ("_asked_at", "_every", "_patience", "_pending", "heard_at", "said_at")

    def __init__(self, every: float, patience: float, now: float) -> None:
        self._every = every
        self._patience = patience
        self._asked_at: float | None = None
        # How many bytes were to be sent then.
        self._pending = 0
        #: When something came in, and when something went out.
        self.heard_at = now
        self.said_at = now

    def look(self, now: float, pending: int = 0) -> tuple[KeepaliveStep, float]:
        """What to do now, with so many bytes still to be sent, and when to look again."""
        if self._asked_at is not None and self.heard_at >= self._asked_at:
            self._asked_at = None
        if self._asked_at is None:
            due = min(self.heard_at, self.said_at) + self._every
            if now < due:
                return KeepaliveStep.WAIT, due
            self._asked_at, self._pending = now, pending
        else:
            if now >= self._asked_at + self._patience:
                if pending >= self._pending:
                    return KeepaliveStep.LOST, now
                self._asked_at, self._pending = now, pending
            # The patience may be the longer of the two: the server must hear from us meanwhile.
            due = self.said_at + self._every
            if now < due:
                return KeepaliveStep.WAIT, min(due, self._asked_at + self._patience)
        self.said_at = now
        return KeepaliveStep.ASK, min(now + self._every, self._asked_at + self._patience)
