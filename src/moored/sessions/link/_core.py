"""Where a session is, and what it does next: the rules for connecting, without any I/O.

::

    connecting ──▶ online ──▶ connecting …     each dial is a new generation
        │            │
        └────────────┴──▶ offline              resting: the user said so
                     │                         refused: to come back would do harm, or no good
                     └──▶ stopped

What is told to it is told with the generation that it comes from; an old one changes nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from moored.kernel import Backoff, BackoffExhausted, Chart, Machine

from .._protocol import CloseClass

__all__ = ["CHART", "DialNow", "Idle", "SessionCore", "Wait"]

#: A link that has lived for so long has proven that it works.
PROVEN = 5.0
#: So many restarts in a row are made at once; after them a server that asks for more must wait.
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
    """Make a link, as this generation."""

    generation: int


class Wait(NamedTuple):
    """Come back at this time."""

    until: float


class Idle(NamedTuple):
    """There is nothing to do until something happens."""


class SessionCore:
    """The state of one session, and the rules.

    :param backoff: the pauses between attempts.
    """

    __slots__ = (
        "_begun",
        "_due_at",
        "_online_at",
        "_onlines",
        "_restarts",
        "backoff",
        "generation",
        "last_kind",
        "last_reason",
        "machine",
    )

    def __init__(self, machine: Machine, backoff: Backoff) -> None:
        self.machine = machine
        self.backoff = backoff
        #: The number of the link; one more at each attempt.
        self.generation = 0
        #: Why it was last not online, or ceased to be; `why` is what holds now.
        self.last_kind: CloseClass | None = None
        self.last_reason: str = ""
        # Whether the dial of this generation is under way.
        self._begun = False
        self._due_at = 0.0
        self._online_at: float | None = None
        # How often it has been online.
        self._onlines = 0
        self._restarts = 0

    # -- what the user wants -------------------------------------------------------------------

    def connect(self, cause: str = "the session was started") -> None:
        """Have a link from now on; somebody asks for it, so a pause is over."""
        if self.machine.phase == "offline":
            self._restarts = 0
            self.backoff.succeed()  # what failed before is another story
            self._dial(cause)
        elif self.machine.step == "waiting":
            self._dial(cause)

    def disconnect(self, cause: str = "the user disconnected it") -> None:
        """Have none until `connect`."""
        if self.machine.phase in ("connecting", "online"):
            self._note(None, cause)
            self._leave()
            self.machine.move("offline/resting", cause=cause)

    def stop(self, cause: str) -> None:
        """For good."""
        if not self.stopped:
            self._note(None, cause)
            self._leave()
            self.machine.move("stopped", cause=cause)

    # -- what happens --------------------------------------------------------------------------

    def next(self, now: float) -> DialNow | Wait | Idle:
        """What to do now."""
        if self.machine.step == "waiting":
            if now < self._due_at:
                return Wait(self._due_at)
            self._dial("the pause is over")
        if not self._is_due:
            return Idle()
        self._begun = True
        self.generation += 1
        return DialNow(self.generation)

    def dialled(self, generation: int) -> bool:
        """A link is open; says whether it is wanted."""
        if generation != self.generation or self.machine.step != "dialling":
            return False
        self.machine.move("connecting/greeting", cause=f"link {generation} is open")
        return True

    def login(self, generation: int, what: str) -> bool:
        """The login needs somebody."""
        if not self.is_linked(generation) or self.online:
            return False
        self.machine.move("connecting/login", cause=f"the server wants: {what}")
        return True

    def ready(self, generation: int, now: float) -> bool:
        """The login is over; says whether that was news."""
        if not self.is_linked(generation) or self.online:
            return False
        self._online_at = now
        self._onlines += 1
        self.machine.move("online", cause=f"link {generation} is ready")
        return True

    def lost(
        self,
        generation: int,
        kind: CloseClass,
        reason: str,
        now: float,
        retry_after: float | None = None,
    ) -> bool:
        """A link is gone, or could not be made; says whether it was the current one."""
        if generation != self.generation or self.machine.phase not in ("connecting", "online"):
            return False
        if self.machine.step == "waiting" or self._is_due:
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
        """It may not be connected any more, for a reason that is not the link's."""
        if self.machine.phase in ("connecting", "online"):
            self._note(kind, reason)
            self._leave()
            self.machine.move("offline/refused", cause=reason)

    def crashed(self, reason: str, now: float) -> None:
        """The connection has crashed and will be started again: it connects by itself."""
        if self.machine.phase in ("connecting", "online"):
            self._note(CloseClass.TRANSIENT, reason)
            self._link_ended(now)
            self.generation += 1  # whatever the old link still says is old
            if self.machine.step != "waiting":
                self._pause(now)

    def proven(self) -> None:
        """The link has done its part, however short it was: what failed before it is over."""
        if self._online_at is not None:
            self._online_at = -math.inf

    def _link_ended(self, now: float) -> None:
        proven = self._online_at is not None and now - self._online_at >= PROVEN
        self._online_at = None
        if proven:
            self.backoff.succeed()
            self._restarts = 0

    def _pause(self, now: float, least: float = 0.0) -> None:
        """Wait for the next attempt, if there is one."""
        reason = self.last_reason
        try:
            self._due_at = now + max(self.backoff.fail(), least)
        except BackoffExhausted:
            # Only a user's own Backoff can be: by default nothing is given up.
            self._note(self.last_kind, f"given up after attempt {self.backoff.attempts}: {reason}")
            self.machine.move("offline/refused", cause=self.last_reason)
        else:
            self.machine.move("connecting/waiting", cause=reason)

    def _dial(self, cause: str) -> None:
        self._begun = False
        self.machine.move("connecting/dialling", cause=cause)

    def _note(self, kind: CloseClass | None, reason: str) -> None:
        self.last_kind, self.last_reason = kind, reason

    def _leave(self) -> None:
        self._online_at = None
        self.generation += 1  # whatever the link still says is old
        self._restarts = 0

    @property
    def _is_due(self) -> bool:
        """Whether there shall be a new link that nobody has begun to make."""
        return self.machine.step == "dialling" and not self._begun

    # -- for the shell -------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether sends can be written."""
        return self._online_at is not None

    @property
    def restarting(self) -> bool:
        """Whether a new link is made at once, in place of one that was in order."""
        dials = self.machine.phase == "connecting" and self.machine.step != "waiting"
        return dials and self.last_kind is CloseClass.RESTART

    @property
    def why(self) -> tuple[CloseClass | None, str]:
        """Why it is not online, as far as there is a reason; nothing while it is."""
        return (None, "") if self.online else (self.last_kind, self.last_reason)

    @property
    def reconnects(self) -> int:
        """How often it was online again; the first time does not count."""
        return max(0, self._onlines - 1)

    def next_attempt_in(self, now: float) -> float | None:
        """Seconds until the pause between two attempts is over; None if there is none."""
        return max(0.0, self._due_at - now) if self.machine.step == "waiting" else None

    @property
    def stopped(self) -> bool:
        """Whether it is over."""
        return self.machine.phase == "stopped"

    def is_linked(self, generation: int) -> bool:
        """Whether this is the link that is open now."""
        return generation == self.generation and (
            self._online_at is not None or self.machine.step in ("greeting", "login")
        )

    def __repr__(self) -> str:
        return f"<SessionCore {self.machine.state}, generation {self.generation}>"
