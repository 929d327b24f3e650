"""The state machine of a session's connection: when to dial, wait or stop. No I/O.

::

    connecting ──▶ online ──▶ connecting …     each dial is a new generation
        │            │
        └────────────┴──▶ offline              resting: the user disconnected it
                     │                         refused: reconnecting would do harm, or is useless
                     └──▶ stopped

Each report carries the generation of its link; a report of an older link changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from moored.kernel import Backoff, BackoffExhausted, Chart, Generation, Machine, duration

from .._protocol import CloseClass

__all__ = ["CHART", "DialNow", "LastLoss", "SessionCore", "Wait"]

#: Seconds after which a link counts as working, so that the backoff begins anew.
PROVEN = 5.0
#: The most restarts in a row without a pause, which a server can request.
RESTARTS = 3

CHART = Chart(
    phases={
        "connecting": ("dialling", "greeting", "login", "waiting"),
        "online": (),
        "offline": ("resting", "refused"),
        "stopped": (),
    },
    moves={
        "connecting": (
            "connecting/dialling",
            "connecting/waiting",
            "offline/resting",
            "offline/refused",
            "stopped",
        ),
        "connecting/dialling": ("connecting/greeting",),
        "connecting/greeting": ("connecting/login", "online"),
        "connecting/login": ("connecting/login", "online"),
        "online": (
            "connecting/dialling",
            "connecting/waiting",
            "offline/resting",
            "offline/refused",
            "stopped",
        ),
        "offline": ("connecting/dialling", "stopped"),
    },
    initial="offline/resting",
)


class DialNow(NamedTuple):
    """Dial, as this generation."""

    generation: int


class Wait(NamedTuple):
    """Call `next` again at this time."""

    until: float


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

    machine: Machine
    #: The pauses between dials.
    backoff: Backoff
    _generation: Generation = field(default_factory=Generation)
    #: Why the session was last offline; unlike `why`, kept while it is online.
    last_kind: CloseClass | None = None
    last_reason: str = ""
    last_loss: LastLoss | None = None
    # Whether the dial of this generation has begun.
    _begun: bool = False
    _due_at: float = 0.0
    _online_at: float | None = None
    # The number of links that became ready.
    _onlines: int = 0
    _restarts: int = 0

    @property
    def generation(self) -> int:
        """The number of the current link; each dial increases it."""
        return self._generation.current

    # -- called by the user --------------------------------------------------------------------

    def connect(self, cause: str = "the session was started") -> None:
        """Dial now, also during the pause between two dials."""
        if self.machine.at("offline"):
            self._restarts = 0
            self.backoff.succeed()  # earlier failures do not count
            self._dial(cause)
        elif self.machine.at("waiting"):
            self._dial(cause)

    def disconnect(self, cause: str = "the user disconnected it") -> None:
        """Go offline until `connect`."""
        if self.machine.at("connecting", "online"):
            self._leave("offline/resting", None, cause)

    def stop(self, cause: str) -> None:
        """Stop for ever."""
        if not self.stopped:
            self._leave("stopped", None, cause)

    # -- called by the connection --------------------------------------------------------------

    def next(self, now: float) -> DialNow | Wait | None:
        """Return what to do now; None to wait for a change of the state."""
        if self.machine.at("waiting"):
            if now < self._due_at:
                return Wait(self._due_at)
            self._dial("the backoff has elapsed")
        if not self._is_due:
            return None
        self._begun = True
        return DialNow(self._generation.next())

    def dialled(self, generation: int) -> bool:
        """Record that a link is open; return whether it is still wanted."""
        if not self._generation.is_current(generation) or not self.machine.at("dialling"):
            return False
        self.machine.move("connecting/greeting", cause=f"link {generation} is open")
        return True

    def login(self, generation: int, what: str) -> bool:
        """Record that the login needs a person; return False if the link is not logging in."""
        if not self.is_linked(generation) or self.online:
            return False
        self.machine.move("connecting/login", cause=f"the server requests: {what}")
        return True

    def ready(self, generation: int, now: float) -> bool:
        """Record that the login is complete; return False if the link is not logging in."""
        if not self.is_linked(generation) or self.online:
            return False
        self._online_at = now
        self._onlines += 1
        before = ""
        if (loss := self.last_loss) is not None and loss.lasted is None:
            self.last_loss = loss._replace(lasted=now - loss.at)
            before = f", after {duration(now - loss.at)} offline: {loss.reason}"
        self.machine.move("online", cause=f"link {generation} is ready{before}")
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
        connects = self.machine.at("connecting", "online")
        if not connects or not self._generation.is_current(generation):
            return False
        if self.machine.at("waiting") or self._is_due:
            return False
        self._note(kind, reason)
        self._link_ended(now)
        if kind.final:
            self.machine.move("offline/refused", cause=f"{kind.value}: {reason}")
        elif kind is CloseClass.RESTART and self._restarts < RESTARTS:
            self._restarts += 1
            self._dial(f"a new link is needed: {reason}")
        else:
            self._pause(now, retry_after or 0.0)
        return True

    def refuse(self, kind: CloseClass, reason: str) -> None:
        """Go offline for a reason that does not come from the link, such as a lost lease."""
        if self.machine.at("connecting", "online"):
            self._leave("offline/refused", kind, reason)

    def crashed(self, reason: str, now: float) -> None:
        """Record that the connection has crashed; dial after a pause."""
        if self.machine.at("connecting", "online"):
            self._note(CloseClass.TRANSIENT, reason)
            self._link_ended(now)
            self._generation.next()
            if not self.machine.at("waiting"):
                self._pause(now)

    def proven(self) -> None:
        """Count the link as working, however short it was: the backoff begins anew."""
        if self._online_at is not None:
            self._online_at = -math.inf

    def _link_ended(self, now: float) -> None:
        proven = self._online_at is not None and now - self._online_at >= PROVEN
        if self._online_at is not None:
            self.last_loss = LastLoss(now, self.last_reason)
        self._online_at = None
        if proven:
            self.backoff.succeed()
            self._restarts = 0

    def _pause(self, now: float, least: float = 0.0) -> None:
        """Wait for the next dial; give up if the backoff is exhausted."""
        reason = self.last_reason
        try:
            self._due_at = now + max(self.backoff.fail(), least)
        except BackoffExhausted:
            # Only a user's own Backoff: the default one never is.
            self._note(self.last_kind, f"given up after attempt {self.backoff.attempts}: {reason}")
            self.machine.move("offline/refused", cause=self.last_reason)
        else:
            self.machine.move("connecting/waiting", cause=reason)

    def _dial(self, cause: str) -> None:
        self._begun = False
        self.machine.move("connecting/dialling", cause=cause)

    def _note(self, kind: CloseClass | None, reason: str) -> None:
        self.last_kind, self.last_reason = kind, reason

    def _leave(self, state: str, kind: CloseClass | None, cause: str) -> None:
        self._note(kind, cause)
        self._online_at = None
        self._generation.next()
        self._restarts = 0
        self.machine.move(state, cause=cause)

    @property
    def _is_due(self) -> bool:
        """Whether a dial is due and has not begun."""
        return self.machine.at("dialling") and not self._begun

    # -- the state -----------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether sends can be written."""
        return self._online_at is not None

    @property
    def restarting(self) -> bool:
        """Whether a new link replaces a working one, without a pause."""
        dials = self.machine.at("connecting") and not self.machine.at("waiting")
        return dials and self.last_kind is CloseClass.RESTART

    @property
    def why(self) -> tuple[CloseClass | None, str]:
        """Why the session is offline: the class and the reason; empty while it is online."""
        return (None, "") if self.online else (self.last_kind, self.last_reason)

    @property
    def reconnects(self) -> int:
        """The number of times that the session came online again."""
        return max(0, self._onlines - 1)

    def next_attempt_in(self, now: float) -> float | None:
        """Seconds until the next dial; None if the session is not waiting for one."""
        return max(0.0, self._due_at - now) if self.machine.at("waiting") else None

    @property
    def stopped(self) -> bool:
        """Whether the session was stopped."""
        return self.machine.at("stopped")

    def is_linked(self, generation: int) -> bool:
        """Whether the link of this generation is open."""
        return self._generation.is_current(generation) and (
            self._online_at is not None or self.machine.at("greeting", "login")
        )
