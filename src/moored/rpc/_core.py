"""One shared connection: what has happened to it, and what is to be done now.

It does no I/O and has no clock of its own: each method is told an event and the time, and returns
actions, which the shell carries out. The same code serves threads, which call it under a lock, and
asyncio.

::

    connecting ──▶ ready ──▶ recovering ──▶ ready …        each arrival at ready is a new generation
        │            │            │
        └────────────┴────────────┴──▶ closed

Invariants:

- at most one attempt is under way, whoever waits for it;
- a generation's error acts at most once, and only while that generation is the current one;
- a connection that lives is not replaced because its server answers UNAVAILABLE;
- the wait before the next attempt is short while somebody waits, and grows while nobody does;
- of a mistake that no further attempt can mend, everybody who waits is told at once;
- what an attempt brings after it was given up is closed;
- a connection that is replaced because of its age is used until the new one is there.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from moored.kernel import Backoff, Chart, Machine

from ._counters import Counters

__all__ = ["CHART", "ConnectionCore", "ShellAct", "ShellAction"]

#: A connection that was not used for so long is looked at before it is handed out.
IDLE = 30.0
#: A new generation that has lived for so long has proven that it works.
PROVEN = 5.0

CHART = Chart(
    phases={
        "connecting": ("dialling", "waiting"),
        "ready": ("serving", "probing", "renewing"),
        "recovering": ("dialling", "waiting"),
        "closed": (),
    },
    moves={
        "connecting/dialling": ("connecting/waiting", "ready/serving", "closed"),
        "connecting/waiting": ("connecting/dialling", "closed"),
        "ready/serving": (
            "ready/probing",
            "ready/renewing",
            "recovering/dialling",
            "recovering/waiting",
            "closed",
        ),
        "ready/probing": ("ready/serving", "recovering/dialling", "recovering/waiting", "closed"),
        "ready/renewing": ("ready/serving", "recovering/dialling", "closed"),
        "recovering/dialling": ("recovering/waiting", "ready/serving", "closed"),
        "recovering/waiting": ("recovering/dialling", "closed"),
    },
    initial="connecting/dialling",
)


class ShellAct(Enum):
    """What the core asks the shell to do."""

    DIAL = "open a channel, as this attempt"
    PROBE = "ask whether the server answers"
    CHECK = "look whether the connection of this generation lives"
    SWAP = "the channel of the attempt is the current one; let the old one end its calls"
    DISCARD = "close the channel of the attempt: nobody wants it any more"
    WAKE = "tell those who wait"
    SET_TIMER = "come back in a while"
    CANCEL_TIMER = "no need to come back"
    CLOSE = "close the current channel"
    REFRESH = "have the credentials refreshed: the server has refused them"


class ShellAction(NamedTuple):
    """One thing that the shell does."""

    act: ShellAct
    #: Of an attempt, or of a generation.
    number: int = 0
    #: For a timer: in how many seconds.
    delay: float = 0.0


Actions = list[ShellAction]


class ConnectionCore:
    """Where a connection is, and where it goes from there.

    :param eager: the waits between attempts while somebody waits.
    :param patient: those while nobody does.
    :param counters: where it is counted what happens.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        eager: Backoff,
        patient: Backoff,
        idle: float = IDLE,
        counters: Counters | None = None,
    ) -> None:
        self.machine = machine
        self.counters = counters or Counters()
        self.generation = 0
        #: How many callers wait for it.
        self.waiting = 0
        self.last_error: BaseException | None = None
        #: What those who wait are told: that to wait longer would not help.
        self.verdict: BaseException | None = None
        self.last_used_at = 0.0
        self._eager = eager
        self._patient = patient
        self.idle = idle
        self._attempt = 0
        self._tried_at = float("-inf")
        self._due_at: float | None = None
        #: Whether the next attempt is not wanted any sooner, whoever comes.
        self._held = False
        self._since = 0.0
        #: The generation whose connection is being looked at, and the error that gave reason to.
        self._suspected = 0
        self.suspected_cause: BaseException | str = ""

    # -- callers -------------------------------------------------------------------------------

    def open(self, now: float) -> Actions:
        """Start the first attempt to connect."""
        self.last_used_at = now
        return self._dial(now)

    def requested(self, now: float) -> Actions:
        """A caller wants the connection; check `usable` afterwards to see whether it must wait."""
        if self.machine.step == "serving" and now - self.last_used_at > self.idle:
            self.machine.move("ready/probing", cause="it was not used for a while")
            return [ShellAction(ShellAct.PROBE, self.generation)]
        self.last_used_at = now
        return []

    def wait(self, now: float) -> Actions:
        """A caller waits from now on."""
        self.waiting += 1
        if self._due_at is None:
            return []
        if self._held:
            return self._refuse_waiter(now)
        # As long as nobody waited, the next attempt was far: it is wanted now.
        sooner = max(now, self._tried_at + self._eager.max)
        if sooner >= self._due_at:
            return []
        self._due_at = sooner
        return [ShellAction(ShellAct.SET_TIMER, delay=sooner - now)]

    def _refuse_waiter(self, now: float) -> Actions:
        """The server refuses us: fail each new caller until the pause has ended."""
        if self._due_at is not None and now < self._due_at:
            return [ShellAction(ShellAct.WAKE)]
        self._held = False
        self._due_at = now
        return [ShellAction(ShellAct.SET_TIMER)]

    def call_waits(self, now: float) -> Actions:
        """A call waits, over a channel that was handed out before."""
        self.counters.calls_waited += 1
        return self.wait(now)

    def leave(self, now: float) -> Actions:
        """A caller does not wait any longer."""
        self.waiting -= 1
        if self.waiting == 0 and self.machine.phase == "connecting" and not self.generation:
            return self.close("nobody waits for it any more")
        return []

    def inherited(self, generation: int, cause: str = "this process was forked") -> None:
        """Start without a channel, but with its number: the first waiting caller opens one."""
        self.generation = generation
        self.machine.move("connecting/waiting", cause=cause)
        self._due_at = float("inf")

    @property
    def usable(self) -> bool:
        """Whether it can be handed out at once."""
        return self.machine.step in ("serving", "renewing")

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self.machine.phase == "closed"

    def used(self, now: float) -> None:
        """A call was made over it."""
        self.last_used_at = max(self.last_used_at, now)

    # -- what comes back -----------------------------------------------------------------------

    def probed(self, generation: int, healthy: bool, now: float) -> Actions:
        """A probe has ended."""
        if generation != self.generation or self.machine.step != "probing":
            return []
        if not healthy:
            self.counters.probes_unhealthy += 1
            return self._recover("the server did not answer the probe", now)
        self.counters.probes_healthy += 1
        self.machine.move("ready/serving", cause="the server answers")
        self.last_used_at = now
        return self._arrived([])

    def broken(
        self, generation: int, cause: BaseException | str, now: float, *, connected: bool = False
    ) -> Actions:
        """A call over this generation failed in a way that a new connection may mend.

        :param connected: whether the connection still seems to live, so that the server itself may
            have answered so. gRPC ends the calls of a lost connection a few milliseconds before it
            reports the loss, so have it looked at again before anything is replaced.
        """
        if generation != self.generation or self.machine.phase != "ready":
            self.counters.stale_errors += generation < self.generation
            return []
        if not connected:
            return self._recover(cause, now)
        if self._suspected == generation:
            return []
        self._suspected, self.suspected_cause = generation, cause
        return [ShellAction(ShellAct.CHECK, generation)]

    def checked(self, generation: int, connected: bool, now: float) -> Actions:
        """Report whether the connection of a generation that was doubted lives."""
        if generation != self._suspected:
            return []
        cause, self._suspected, self.suspected_cause = self.suspected_cause, 0, ""
        if not connected:
            return self.broken(generation, cause, now)
        self.counters.unavailable_answers += 1
        return []

    def blamed(self, now: float) -> int:
        """The generation of an error that does not say where it came from.

        The current one, if there was none before, or if it is proven; else the one before, of
        which late errors are to be expected.
        """
        fresh = self.generation > 1 and now - self._since < PROVEN
        return self.generation - fresh

    def aged(self, now: float) -> Actions:
        """The current channel is old: make another, and use this one until it is there."""
        if self.machine.step != "serving":
            return []
        self.machine.move("ready/renewing", cause="the channel is old")
        return self._begin(now)

    def dialled(self, attempt: int, now: float) -> Actions:
        """The attempt has brought a channel that works."""
        if not self._is_current(attempt):
            return [ShellAction(ShellAct.DISCARD, attempt)]
        self.generation += 1
        self.counters.connects += 1
        self.counters.renewals += self.machine.step == "renewing"
        self._since = now
        self.last_used_at = now
        self.machine.move("ready/serving", cause=f"generation {self.generation} is connected")
        return self._arrived([ShellAction(ShellAct.SWAP, attempt)])

    def kept(self, attempt: int, now: float) -> Actions:
        """The strategy has decided to keep the connection."""
        if not self._is_current(attempt) or self.generation == 0:
            return []
        self.machine.move("ready/serving", cause="the strategy keeps the connection")
        return self._arrived([])

    def failed(self, attempt: int, error: BaseException, now: float) -> Actions:
        """The attempt has failed."""
        if not self._is_current(attempt):
            return []
        self.last_error = error
        self.counters.connect_failures += 1
        if self.machine.step == "renewing":
            self.machine.move("ready/serving", cause=error)
            return []
        return self._wait(error, now)

    def failed_for_good(self, attempt: int, error: BaseException, now: float) -> Actions:
        """The attempt has failed, and so will the next, until somebody mends what is wrong.

        All who wait are told. One that never had a channel is closed; for others an attempt is made
        when somebody comes, and rarely while nobody does.
        """
        if not self._is_current(attempt):
            return []
        if self.machine.step == "renewing":
            return self.failed(attempt, error, now)
        if self.generation:
            return self._fail_waiters(error, now)
        self.last_error = error
        self.counters.connect_failures += 1
        actions = self.close(error)
        self.verdict = error
        return actions

    def refused(self, attempt: int, error: BaseException, now: float) -> Actions:
        """The attempt has failed, as we are not wanted: the next is made rarely, whoever comes.

        All who wait are told, and all who come before it.
        """
        if not self._is_current(attempt):
            return []
        if self.machine.step == "renewing":
            return self.failed(attempt, error, now)
        self._held = True
        return self._fail_waiters(error, now)

    def _fail_waiters(self, error: BaseException, now: float) -> Actions:
        self.last_error = self.verdict = error
        self.counters.connect_failures += 1
        self.machine.move(f"{self.machine.phase}/waiting", cause=error)
        delay = self._patient.fail()
        self._due_at = now + delay
        # One that never had a channel, and that nobody waits for, is nobody's.
        timer = [ShellAction(ShellAct.SET_TIMER, delay=delay)] if self.generation else []
        return [*timer, ShellAction(ShellAct.WAKE)]

    def due(self, now: float) -> Actions:
        """Dial if the wait has ended; if the timer fired early, set it again for the rest.

        Event loops may fire a timer up to a millisecond before its time (uvloop does).
        """
        if self._due_at is None:
            return []
        if now < self._due_at:
            return [ShellAction(ShellAct.SET_TIMER, delay=self._due_at - now)]
        return self._dial(now)

    def close(self, cause: BaseException | str) -> Actions:
        """Close the connection."""
        if self.closed:
            return []
        self.machine.move("closed", cause=cause)
        self._due_at = None
        self.verdict = None
        return [
            ShellAction(ShellAct.CANCEL_TIMER),
            ShellAction(ShellAct.CLOSE, self.generation),
            ShellAction(ShellAct.WAKE),
        ]

    # -- attempts ------------------------------------------------------------------------------

    def _is_current(self, attempt: int) -> bool:
        return attempt == self._attempt and self.machine.step in ("dialling", "renewing")

    def _recover(self, cause: BaseException | str, now: float) -> Actions:
        """A new generation is needed: at once, unless the last one did not live for long."""
        self.counters.recoveries += 1
        if self.machine.step == "renewing":
            # Another is on its way already.
            self.machine.move("recovering/dialling", cause=cause)
            return []
        if now - self._since >= PROVEN:
            self._eager.succeed()
            self._patient.succeed()
            self.machine.move("recovering/dialling", cause=cause)
            return self._begin(now)
        return self._wait(cause, now)

    def _wait(self, cause: BaseException | str, now: float) -> Actions:
        phase = "connecting" if self.machine.phase == "connecting" else "recovering"
        self.machine.move(f"{phase}/waiting", cause=cause)
        delay = (self._eager if self.waiting else self._patient).fail()
        self._due_at = now + delay
        return [ShellAction(ShellAct.SET_TIMER, delay=delay)]

    def _dial(self, now: float) -> Actions:
        if self.machine.step != "dialling":
            self.machine.move(f"{self.machine.phase}/dialling", cause="the wait is over")
        return self._begin(now)

    def _begin(self, now: float) -> Actions:
        self._due_at = None
        self._held = False
        self.verdict = None
        self._attempt += 1
        self._tried_at = now
        return [ShellAction(ShellAct.DIAL, self._attempt)]

    def _arrived(self, actions: Actions) -> Actions:
        # Those who wait are counted off by the shell, as it tells them.
        return [*actions, ShellAction(ShellAct.WAKE)] if self.waiting else actions

    def __repr__(self) -> str:
        return (
            f"<ConnectionCore {self.machine.state}, generation {self.generation}, "
            f"{self.waiting} waiting>"
        )
