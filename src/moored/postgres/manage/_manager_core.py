"""The connection manager's decisions, without I/O and without a clock.

Each method of `ManagerCore` takes an event and returns the actions that the `Manager` carries out,
in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moored.kernel import Backoff, Machine

from ..report import CLIENT, CONDITIONS, LOCKING, POOL, RUNNING, STREAM
from ..server import Diagnosis, FaultVerdict, Step

__all__ = [
    "Act",
    "Action",
    "ManagerCore",
    "Role",
    "Timer",
]

#: How often the manager checks why it still waits for the lock or the slot, in seconds.
CHECK_EVERY = 10.0
#: When it first checks the wait for the lock, in seconds: a hand-over takes less than this.
FIRST_CHECK = 1.0
#: After so many seconds of streaming, the backoff is reset.
LIVENESS = 5.0


class Role(Enum):
    """The purpose of a pool."""

    ADMIN = "admin"
    SNAPSHOT = "snapshot"


class Timer(Enum):
    """A timer of the manager."""

    LOCK = "lock"
    CONFIGURATION = "configuration"
    LIVENESS = "liveness"
    RETRY = "retry"


class Act(Enum):
    """A kind of action."""

    START_CLIENT = "start the replication client"
    STOP_CLIENT = "stop the replication client, and the jobs of its stream"
    START_POOL = "start a pool"
    CHECK_INTEGRITY = "check timeline, slot and publication"
    START_STREAMING = "start streaming"
    SET = "set a condition"
    CLEAR = "clear a condition"
    EMIT = "emit an event"
    SET_TIMER = "set a timer"
    CANCEL_TIMER = "cancel a timer"
    BREAK_LOCK = "check whether the lock is abandoned"
    UNBLOCK_SLOT = "check which transactions block the slot"
    RESTART = "restart the connection subsystem"
    DROP_SLOT = "drop the slot, and restart"
    GIVE_UP = "stop: an operator must change something"


@dataclass(frozen=True)
class Action:
    """One action for the `Manager` to carry out."""

    act: Act
    #: The condition, event, timer or pool that it is about.
    name: str = ""
    #: For a timer, a restart and an event of a failure: the wait in seconds.
    delay: float = 0.0
    #: The reason, as text.
    detail: str = ""


Actions = list[Action]

_LOCKING = Step.ACQUIRE_LOCK
_ABOUT_CLIENT = tuple(
    f"{CLIENT}:{step}" for step in ("connecting", "acquiring_lock", "configuring_connection")
)
#: The conditions that are not met without the replication connection, in reverse order.
_OF_THE_STREAM = tuple(name for name in reversed(CONDITIONS) if "pool" not in name)
_BEFORE_LOCK = (Step.CONNECTED, Step.IDENTIFY_SYSTEM, Step.QUERY_PG_INFO)


class ManagerCore:
    """The state of the connection subsystem, and its transitions."""

    def __init__(self, machine: Machine, backoff: Backoff) -> None:
        self.machine = machine
        self.backoff = backoff
        #: The pools of this run that were started, and those that have had all connections.
        self._started: set[Role] = set()
        self._ready: set[Role] = set()
        #: What has worked before: its errors may be temporary, and are retried.
        self._pools_worked: set[Role] = set()
        self._identified = False
        #: Whether a replication client was ever set up: `recreate_slot` applies only once.
        self.configured = False
        #: Whether it was ever active: from then on, every error may be temporary.
        self.was_active = False

    def start(self, cause: str = "started") -> Actions:
        """Start, or restart, the connection subsystem."""
        if self.machine.history:
            self.machine.move("connection_setup", cause=cause)
        self._started.clear()
        self._ready.clear()
        return self._start_client(cause)

    def _start_client(self, cause: str) -> Actions:
        self._move(f"{CLIENT}:connecting", cause)
        return [Action(Act.START_CLIENT)]

    # -- the replication client ----------------------------------------------------------------

    def client_at(self, step: Step) -> Actions:
        """React to a step that the replication client has reached in its setup."""
        if step in _BEFORE_LOCK or step in (Step.START_STREAMING, Step.STREAMING):
            return []
        if step is _LOCKING:
            self._move(LOCKING, "the replication client is connected")
            self._identified = True
            return [
                Action(Act.EMIT, "waiting_for_connection_lock"),
                Action(Act.SET_TIMER, Timer.LOCK.value, FIRST_CHECK),
                # Callers need no lock: the server is known now.
                *self._start_pools(Role.SNAPSHOT),
            ]
        actions: Actions = []
        if self.machine.at(LOCKING):
            actions += self._locked()
        if step is Step.READY_TO_STREAM:
            actions += self._configured()
        return actions

    def _locked(self) -> Actions:
        self._move(f"{CLIENT}:configuring_connection", "the lock was granted")
        return [
            Action(Act.CANCEL_TIMER, Timer.LOCK.value),
            Action(Act.SET, "pg_lock_acquired"),
            Action(Act.EMIT, "connection_lock_acquired"),
            Action(Act.SET_TIMER, Timer.CONFIGURATION.value, CHECK_EVERY),
        ]

    def _configured(self) -> Actions:
        self._move(POOL, "the replication client is ready")
        self.configured = True
        actions = [
            Action(Act.CANCEL_TIMER, Timer.CONFIGURATION.value),
            Action(Act.SET, "replication_client_ready"),
        ]
        if self._ready == set(Role):
            self._move(f"{POOL}:connecting", "the pools are already open")
            return [*actions, *self._pools_ready()]
        self._move(f"{POOL}:connecting", "the pools were started")
        return [*actions, *self._start_pools(*Role)]

    def _start_pools(self, *roles: Role) -> Actions:
        """Start those of these pools that this run has not started yet."""
        new = [role for role in roles if role not in self._started]
        self._started.update(new)
        return [Action(Act.START_POOL, role.value) for role in new]

    def rewind(self) -> Actions:
        """Restart the stream for a consumer that needs transactions again."""
        if not self.machine.at("running"):
            return []  # the stream has not started yet, and will start early enough
        self.machine.move("connection_setup", cause="a consumer attached again")
        why = "the stream is restarted for a consumer that attached again"
        return [
            Action(Act.CANCEL_TIMER, Timer.LIVENESS.value),
            # The lock is lost with the connection: another instance may get it.
            *(Action(Act.CLEAR, condition, detail=why) for condition in _OF_THE_STREAM),
            Action(Act.STOP_CLIENT),
            *self._start_client("a consumer attached again"),
        ]

    # -- pools, integrity, streaming -----------------------------------------------------------

    def pool_ready(self, role: Role) -> Actions:
        """React to a pool with all its connections open."""
        actions = [Action(Act.SET, f"{role.value}_connection_pool_ready")]
        if role in self._ready:
            return actions
        self._ready.add(role)
        self._pools_worked.add(role)
        if self._ready == set(Role) and self.machine.at(f"{POOL}:connecting"):
            actions += self._pools_ready()
        return actions

    def _pools_ready(self) -> Actions:
        self._move("start_shapes_supervisor", "both pools are ready")
        return [Action(Act.CHECK_INTEGRITY)]

    def pool_repopulating(self, role: Role, why: str) -> Actions:
        """React to a pool that has lost connections and replaces them; the subsystem continues."""
        return [Action(Act.CLEAR, f"{role.value}_connection_pool_ready", detail=why)]

    def pool_silent(self, role: Role, why: str) -> Actions:
        """React to a server that does not answer a pool, or answers again: callers may wait."""
        return [Action(Act.SET, f"{role.value}_connection_pool_ready", detail=why)]

    def integrity_checked(self) -> Actions:
        """Start streaming: the stored state belongs to the server's history, or was reset."""
        self._move(STREAM, "timeline, slot and publication were checked")
        self._move("waiting_for_streaming_confirmation", "streaming was requested")
        self.was_active = True
        return [
            Action(Act.SET, "integrity_checks_passed"),
            Action(Act.SET, "shape_log_collector_ready"),
            Action(Act.SET, "supervisor_processes_ready"),
            Action(Act.EMIT, "ready"),
            Action(Act.START_STREAMING),
        ]

    def first_message(self) -> Actions:
        """React to the first message of the stream."""
        if not self.machine.at("waiting_for_streaming_confirmation"):
            return []
        self._move("streaming", "the first message was received")
        return [Action(Act.SET_TIMER, Timer.LIVENESS.value, LIVENESS)]

    def stalled(self, stalled: bool) -> Actions:
        """React to a consumer that has stopped all others for too long, or to its recovery."""
        if not self.machine.at("running"):
            return []
        why = "reading is paused: the queue of a consumer is full" if stalled else ""
        return [Action(Act.SET, "shape_log_collector_ready", detail=why)]

    # -- timers --------------------------------------------------------------------------------

    def timer(self, timer: Timer) -> Actions:
        """React to a timer that has expired."""
        if timer is Timer.LIVENESS:
            self.backoff.succeed()
            return []
        if timer is Timer.RETRY:
            if self.machine.at(CLIENT):
                return self._start_client("the backoff has elapsed")
            self._move(f"{POOL}:connecting", "the backoff has elapsed")
            self._started &= self._ready
            return self._start_pools(*Role)
        check = Act.BREAK_LOCK if timer is Timer.LOCK else Act.UNBLOCK_SLOT
        return [Action(check), Action(Act.SET_TIMER, timer.value, CHECK_EVERY)]

    # -- failures ------------------------------------------------------------------------------

    def client_failed(self, diagnosis: Diagnosis) -> Actions:
        """React to an error of the replication client, which has ended it."""
        if not self.machine.at(*_ABOUT_CLIENT):
            return self._not_retryable(diagnosis) or self._restart(diagnosis)
        actions: Actions = []
        if self.machine.at(LOCKING):
            name = "failed_to_acquire_connection_lock"
            actions.append(Action(Act.EMIT, name, detail=str(diagnosis)))
        return actions + (self._not_retryable(diagnosis) or self._retry(CLIENT, diagnosis))

    def pool_failed(self, role: Role, diagnosis: Diagnosis) -> Actions:
        """React to a pool that cannot be filled."""
        if diagnosis.verdict is FaultVerdict.FATAL and (
            self.was_active or role in self._pools_worked
        ):
            # The pool retries by itself, and the stream, if there is one, continues.
            return self.pool_repopulating(role, str(diagnosis))
        if not self.machine.at(f"{POOL}:connecting"):
            return self._not_retryable(diagnosis) or self._restart(diagnosis)
        return self._not_retryable(diagnosis) or self._retry(POOL, diagnosis)

    def subsystem_failed(self, diagnosis: Diagnosis) -> Actions:
        """React to a failure that is not retried in place: restart the subsystem."""
        return self._not_retryable(diagnosis) or self._restart(diagnosis)

    def _not_retryable(self, diagnosis: Diagnosis) -> Actions:
        """Return the actions for an error that a retry cannot fix; none for other errors."""
        text = str(diagnosis)
        # A standby has connected before, perhaps days ago.
        connected = self._identified and self.machine.at(f"{CLIENT}:connecting")
        if diagnosis.verdict is FaultVerdict.FATAL and not (self.was_active or connected):
            return [Action(Act.EMIT, "config_error", detail=text), Action(Act.GIVE_UP, detail=text)]
        if diagnosis.verdict is FaultVerdict.DROP_SLOT:
            return [Action(Act.EMIT, "warning", detail=text), Action(Act.DROP_SLOT, detail=text)]
        return []

    def _restart(self, diagnosis: Diagnosis) -> Actions:
        wait = self.backoff.fail()
        restart = Action(Act.RESTART, "", wait, str(diagnosis))
        return [self._error_event(diagnosis, wait), restart]

    def _retry(self, step: str, diagnosis: Diagnosis) -> Actions:
        """Retry the connection of the current step in place, from its first step."""
        wait = self.backoff.fail()
        self._move(step, str(diagnosis))
        actions = [
            self._error_event(diagnosis, wait),
            Action(Act.SET_TIMER, Timer.RETRY.value, wait),
        ]
        if step == CLIENT:
            actions += [
                Action(Act.CANCEL_TIMER, Timer.LOCK.value),
                Action(Act.CANCEL_TIMER, Timer.CONFIGURATION.value),
                Action(Act.CLEAR, "pg_lock_acquired", detail=str(diagnosis)),
            ]
        return actions

    def _error_event(self, diagnosis: Diagnosis, wait: float) -> Action:
        return Action(Act.EMIT, "connection_error", wait, str(diagnosis))

    def _move(self, to: str, cause: str) -> None:
        phase = "running" if to in RUNNING else "connection_setup"
        self.machine.move(f"{phase}/{to}", cause=cause)
