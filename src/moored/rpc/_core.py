"""The decisions about one shared connection: when to connect, probe, replace and close it.

It does no I/O and has no clock: each method receives an event and the time, and returns actions,
which the shell carries out. The same code serves threads, which call it under a lock, and asyncio.

::

    connecting ──▶ ready ──▶ recovering ──▶ ready …        each arrival at ready is a new generation
        │            │            │
        └────────────┴────────────┴──▶ closed

Invariants:

- at most one attempt is in progress, however many callers wait for it;
- an error of a generation acts at most once, and only while that generation is current;
- a live connection is not replaced because its server answers UNAVAILABLE;
- the wait before the next attempt is short while a caller waits, and grows while none does;
- an error that no further attempt can fix fails all waiting callers at once;
- the channel of an abandoned attempt is closed;
- a connection that is replaced because of its age is used until the new one is ready.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from moored.kernel import Backoff, Chart, Clock, Generation, Machine, Recorder

from ._counters import Counters
from ._verdicts import Verdict

__all__ = ["CHART", "ConnectionCore", "ShellAct", "ShellAction"]

#: A generation that has lived for this many seconds counts as healthy.
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
    """What the shell is to do."""

    DIAL = "open a channel, as this attempt"
    PROBE = "check with a call whether the server answers"
    CHECK = "check whether the connection of this generation is alive"
    WAKE = "wake the waiting callers"
    SET_TIMER = "call `due` after a delay"
    CANCEL_TIMER = "cancel the timer"
    CLOSE = "close the current channel"
    REFRESH = "refresh the credentials, which the server has refused"


class ShellAction(NamedTuple):
    """One action of the shell."""

    act: ShellAct
    #: The number of an attempt, or of a generation.
    number: int = 0
    #: The delay of a timer, in seconds.
    delay: float = 0.0


Actions = list[ShellAction]


class ConnectionCore:
    """The state of a connection, and its transitions.

    :param idle: a connection that was idle for this many seconds is probed before it is handed out.
    :param counters: the counters of the connection's address.
    """

    def __init__(
        self,
        address: str,
        clock: Clock,
        recorder: Recorder,
        *,
        idle: float = 30.0,
        counters: Counters | None = None,
    ) -> None:
        self.machine = Machine(f"rpc.{address}", CHART, clock=clock, recorder=recorder)
        self.counters = counters or Counters()
        #: Numbers the channels; an error of an older one is ignored.
        self.generations = Generation()
        #: Whether it is kept without waiting callers, because a client may hold its channel.
        self.lasting = False
        #: The number of waiting callers.
        self.waiting = 0
        self.last_error: BaseException | None = None
        #: The error that fails all waiting callers, because waiting longer would not help.
        self.verdict: BaseException | None = None
        self.last_used_at = 0.0
        # The waits between attempts while callers wait, and while no caller waits.
        self._eager = Backoff(0.02, 0.2, jitter=0.25, clock=clock)
        self._patient = Backoff(0.25, 30.0, jitter=0.25, clock=clock)
        self.idle = idle
        self._attempt = 0
        self._tried_at = float("-inf")
        self._due_at: float | None = None
        #: Whether a waiting caller must not bring the next attempt forward: we were refused.
        self._held = False
        self._since = 0.0
        #: The generation whose connection is being checked, and the error that led to the check.
        self._suspected = 0
        self.suspected_cause: BaseException | str = ""

    # -- callers -------------------------------------------------------------------------------

    def open(self, now: float) -> Actions:
        """Start the first attempt to connect."""
        self.last_used_at = now
        return self._dial(now)

    def requested(self, now: float) -> Actions:
        """A caller requests the connection, and must wait unless `usable` holds afterwards."""
        if self.machine.at("serving") and now - self.last_used_at > self.idle:
            self.machine.move("ready/probing", cause="it was idle for too long")
            return [ShellAction(ShellAct.PROBE, self.generation)]
        self.last_used_at = now
        return []

    def wait(self, now: float) -> Actions:
        """Count a caller that begins to wait."""
        self.waiting += 1
        if self._due_at is None:
            return []
        if self._held:
            return self._refuse_waiter(now)
        # The delay was chosen while no caller waited: bring the next attempt forward.
        sooner = max(now, self._tried_at + self._eager.max)
        if sooner >= self._due_at:
            return []
        self._due_at = sooner
        return [ShellAction(ShellAct.SET_TIMER, delay=sooner - now)]

    def _refuse_waiter(self, now: float) -> Actions:
        """Fail a new waiter while the pause after a refusal lasts; then let it try again."""
        if self._due_at is not None and now < self._due_at:
            return [ShellAction(ShellAct.WAKE)]
        self._held = False
        self._due_at = now
        return [ShellAction(ShellAct.SET_TIMER)]

    def call_waits(self, now: float) -> Actions:
        """Count a call that begins to wait, over a channel that was handed out before."""
        self.counters.calls_waited += 1
        return self.wait(now)

    def leave(self, now: float) -> Actions:
        """Count a caller that stops waiting; close a connection that no client ever got."""
        self.waiting -= 1
        if not self.waiting and not self.lasting:
            return self.close("no caller waits for it any longer")
        return []

    def inherited(self, generations: Generation, cause: str) -> None:
        """Continue after these generations, without a channel, until a caller waits."""
        self.generations = generations
        self.lasting = True
        self.machine.move("connecting/waiting", cause=cause)
        self._due_at = float("inf")

    @property
    def generation(self) -> int:
        """The number of the current channel; 0 before the first."""
        return self.generations.current

    @property
    def usable(self) -> bool:
        """Whether the connection can be handed out without waiting."""
        return self.machine.at("serving", "renewing")

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self.machine.at("closed")

    # -- events --------------------------------------------------------------------------------

    def probed(self, generation: int, healthy: bool, now: float) -> Actions:
        """The probe of a generation has ended."""
        if not self.generations.is_current(generation) or not self.machine.at("probing"):
            return []
        if not healthy:
            self.counters.probes_unhealthy += 1
            return self._recover("the server did not answer the probe", now)
        self.counters.probes_healthy += 1
        self.machine.move("ready/serving", cause="the server answers")
        self.last_used_at = now
        return self._arrived()

    def broken(
        self, generation: int, cause: BaseException | str, now: float, *, connected: bool = False
    ) -> Actions:
        """A call over this generation failed with an error that a new connection may fix.

        :param connected: whether the connection still seems alive, so that the error may be the
            server's own answer. gRPC ends the calls of a lost connection a few milliseconds before
            it reports the loss, so the connection is checked again before it is replaced.
        """
        if not self.generations.is_current(generation) or not self.machine.at("ready"):
            self.counters.stale_errors += generation < self.generation
            return []
        if not connected:
            return self._recover(cause, now)
        if self._suspected == generation:
            return []
        self._suspected, self.suspected_cause = generation, cause
        return [ShellAction(ShellAct.CHECK, generation)]

    def checked(self, generation: int, connected: bool, now: float) -> Actions:
        """The check that `broken` asked for has ended: the connection is alive or not."""
        if generation != self._suspected:
            return []
        cause, self._suspected, self.suspected_cause = self.suspected_cause, 0, ""
        if not connected:
            return self.broken(generation, cause, now)
        self.counters.unavailable_answers += 1
        return []

    def blamed(self, now: float) -> int:
        """Return the generation to which an error without a generation is attributed.

        It is the current one if that is the first, or has proven healthy; otherwise it is the one
        before, of which late errors are to be expected.
        """
        fresh = self.generation > 1 and now - self._since < PROVEN
        return self.generation - fresh

    def aged(self, now: float) -> Actions:
        """The current channel has reached `max_age`: replace it, and use it until then."""
        if not self.machine.at("serving"):
            return []
        self.machine.move("ready/renewing", cause="the channel is old")
        return self._begin(now)

    def dialled(self, attempt: int, now: float) -> Actions | None:
        """The attempt has succeeded; None if it was abandoned: its channel must be closed."""
        if not self._is_current(attempt):
            return None
        self.generations.next()
        self.lasting = True
        self.counters.connects += 1
        self.counters.renewals += self.machine.at("renewing")
        self._since = now
        self.last_used_at = now
        self.machine.move("ready/serving", cause=f"generation {self.generation} is connected")
        return self._arrived()

    def kept(self, attempt: int, now: float) -> Actions:
        """The strategy has decided to keep the connection."""
        if not self._is_current(attempt) or self.generation == 0:
            return []
        self.machine.move("ready/serving", cause="the strategy keeps the connection")
        return self._arrived()

    def failed(
        self, attempt: int, error: BaseException, now: float, verdict: Verdict = Verdict.RETRY
    ) -> Actions:
        """The attempt has failed; the verdict tells whether others may succeed.

        MISTAKE: all waiting callers fail. A connection that no client ever got is closed;
        otherwise a new caller starts another attempt, and without callers attempts are rare.

        REFUSED: all waiting callers fail, and so do new ones before the next attempt. Attempts are
        rare from now on, also while callers wait.
        """
        if not self._is_current(attempt):
            return []
        self.last_error = error
        self.counters.connect_failures += 1
        if self.machine.at("renewing"):
            self.machine.move("ready/serving", cause=error)
            return []
        if verdict is Verdict.RETRY:
            return self._wait(error, now)
        if verdict is Verdict.MISTAKE and not self.lasting:
            actions = self.close(error)
            self.verdict = error
            return actions
        self._held = verdict is Verdict.REFUSED
        return self._fail_waiters(error, now)

    def _fail_waiters(self, error: BaseException, now: float) -> Actions:
        self.verdict = error
        self.machine.move(f"{self.machine.phase}/waiting", cause=error)
        delay = self._patient.fail()
        self._due_at = now + delay
        # A connection that no client ever got is only retried when a caller waits for it.
        timer = [ShellAction(ShellAct.SET_TIMER, delay=delay)] if self.lasting else []
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
        return attempt == self._attempt and self.machine.at("dialling", "renewing")

    def _recover(self, cause: BaseException | str, now: float) -> Actions:
        """Replace the current generation: at once, or after a wait if it did not live for long."""
        self.counters.recoveries += 1
        if self.machine.at("renewing"):
            # The attempt that was to renew it continues.
            self.machine.move("recovering/dialling", cause=cause)
            return []
        if now - self._since >= PROVEN:
            self._eager.succeed()
            self._patient.succeed()
            self.machine.move("recovering/dialling", cause=cause)
            return self._begin(now)
        return self._wait(cause, now)

    def _wait(self, cause: BaseException | str, now: float) -> Actions:
        phase = "connecting" if self.machine.at("connecting") else "recovering"
        self.machine.move(f"{phase}/waiting", cause=cause)
        delay = (self._eager if self.waiting else self._patient).fail()
        self._due_at = now + delay
        return [ShellAction(ShellAct.SET_TIMER, delay=delay)]

    def _dial(self, now: float) -> Actions:
        if not self.machine.at("dialling"):
            self.machine.move(f"{self.machine.phase}/dialling", cause="the wait has ended")
        return self._begin(now)

    def _begin(self, now: float) -> Actions:
        self._due_at = None
        self._held = False
        self.verdict = None
        self._attempt += 1
        self._tried_at = now
        return [ShellAction(ShellAct.DIAL, self._attempt)]

    def _arrived(self) -> Actions:
        # The shell decrements `waiting` when it wakes the callers.
        return [ShellAction(ShellAct.WAKE)] if self.waiting else []
