"""What a session does about its link: what the reason of a loss means, and what is kept of it.

When to dial is decided by `Reconnect`, the chart is that of every link. Each report carries the
generation of its link, the number of its dial; a report of an older link changes nothing. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moored.kernel import Pauses, Reconnect, duration, link_chart

from .._protocol import CloseClass

__all__ = ["CHART", "PAUSES", "LastLoss", "SessionCore"]

CHART = link_chart("greeting", "login")
#: Also after a link that has proven to work, a pause: the server may have restarted for all.
PAUSES = Pauses(proven=5.0)
#: The most restarts in a row without a pause, which a server can request.
RESTARTS = 3


class LastLoss(NamedTuple):
    """The last loss of a link that was ready."""

    #: When, in monotonic seconds.
    at: float
    reason: str
    #: Seconds until the session was online again; None while it is not.
    lasted: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class SessionCore:
    """The connection state of one session."""

    link: Reconnect
    #: Why the session was last offline; unlike `why`, kept while it is online.
    last_kind: CloseClass | None = None
    last_reason: str = ""
    last_loss: LastLoss | None = None
    # The number of links that became ready.
    _onlines: int = 0
    _restarts: int = 0

    # -- called by the user --------------------------------------------------------------------

    def connect(self, now: float, cause: str = "the session was started") -> None:
        """Dial now, also during the pause between two dials."""
        if self.link.machine.at("off"):
            self._restarts = 0
        self.link.want(now, cause)

    def disconnect(self, cause: str = "the user disconnected it") -> None:
        """Go offline until `connect`."""
        if self.link.rest(cause):
            self.last_kind, self.last_reason = None, cause

    def stop(self, cause: str) -> None:
        """Stop for ever."""
        if self.link.stop(cause):
            self.last_kind, self.last_reason = None, cause

    # -- called by the connection --------------------------------------------------------------

    def dialed(self, generation: int) -> bool:
        """Record that a link is open; return whether it is still wanted."""
        at, why = self.link.machine.at("dialing"), f"link {generation} is open"
        return at and self.link.step(generation, "greeting", why)

    def login(self, generation: int, what: str) -> bool:
        """Record that the login needs a person; return False if the link is not logging in."""
        return self.link.step(generation, "login", f"the server requests: {what}")

    def ready(self, generation: int, now: float) -> bool:
        """Record that the login is complete; return False if the link is not logging in."""
        loss, before = self.last_loss, ""
        if loss is not None and loss.lasted is None:
            loss = loss._replace(lasted=now - loss.at)
            before = f", after {duration(now - loss.at)} offline: {loss.reason}"
        if not self.link.up(generation, now, f"link {generation} is ready{before}"):
            return False
        self.last_loss = loss
        self._onlines += 1
        return True

    def lost(
        self,
        generation: int,
        kind: CloseClass,
        reason: str,
        now: float,
        retry_after: float | None = None,
    ) -> bool:
        """Record that a link or a dial has failed; return whether it was the current one."""
        link = self.link
        if not link.is_current(generation):
            return False
        self.last_kind, self.last_reason = kind, reason
        if link.is_up:
            self.last_loss = LastLoss(now, reason)
        if now >= link.proven_at:
            self._restarts = 0
        if kind.final:
            link.refuse(f"{kind.value}: {reason}")
        elif kind is CloseClass.RESTART and self._restarts < RESTARTS:
            self._restarts += 1
            link.lost(generation, f"a new link is needed: {reason}", now, pause=0.0)
        elif loss := link.lost(generation, reason, now):
            self.last_reason = loss.why
            if retry_after and link.next_dial_at is not None:
                link.next_dial_at = max(link.next_dial_at, now + retry_after)
        return True

    def refuse(self, kind: CloseClass, reason: str) -> None:
        """Go offline for a reason that does not come from the link, such as a lost lease."""
        if self.link.refuse(reason):
            self.last_kind, self.last_reason = kind, reason

    def crashed(self, reason: str, now: float) -> None:
        """Record that the connection has crashed; dial after a pause."""
        if not self.link.machine.at("off"):
            self.last_kind, self.last_reason = CloseClass.TRANSIENT, reason
            self.lost(self.link.number, CloseClass.TRANSIENT, reason, now)

    # -- the state -----------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether sends can be written."""
        return self.link.is_up

    @property
    def restarting(self) -> bool:
        """Whether a new link replaces a working one, without a pause."""
        return self.last_kind is CloseClass.RESTART and self.link.machine.at("connecting")

    @property
    def why(self) -> tuple[CloseClass | None, str]:
        """Why the session is offline: the class and the reason; empty while it is online."""
        return (None, "") if self.link.is_up else (self.last_kind, self.last_reason)

    @property
    def reconnects(self) -> int:
        """The number of times that the session came online again."""
        return max(0, self._onlines - 1)

    def next_attempt_in(self, now: float) -> float | None:
        """Seconds until the next dial; None if the session is not waiting for one."""
        due = self.link.next_dial_at if self.link.machine.at("down") else None
        return None if due is None else max(0.0, due - now)

    @property
    def stopped(self) -> bool:
        """Whether the session was stopped."""
        return self.link.machine.at("off/stopped")
