"""The connection manager's decisions: what has happened, and what is to be done now.

It does no I/O and has no clock of its own: each method is told an event, and returns actions. The
shell carries them out, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moored.kernel import Backoff, Machine

from ..report import CLIENT, CONDITIONS, POOL, RUNNING, STREAM
from ..server import Diagnosis, FaultVerdict, Step

__all__ = [
    "Act",
    "Action",
    "ManagerCore",
    "Role",
    "Timer",
]

#: How often the manager looks why it is still waiting: for the lock, or for the slot.
CHECK_EVERY = 10.0
#: When it does so for the first time: a hand-over is quicker, so a wait as long as this is told.
FIRST_LOOK = 1.0
#: A stream that lived for so long has proven that it works.
LIVENESS = 5.0


class Role(Enum):
    """What a pool is for."""

    ADMIN = "admin"
    SNAPSHOT = "snapshot"


class Timer(Enum):
    """What is looked at later."""

    LOCK = "lock"
    CONFIGURATION = "configuration"
    LIVENESS = "liveness"
    RETRY = "retry"


class Act(Enum):
    """What the shell can be told to do."""

    START_CLIENT = "start the replication client"
    STOP_CLIENT = "stop the replication client"
    START_POOLS = "start the pools"
    CHECK_INTEGRITY = "check timeline, slot and publication"
    START_STREAMING = "start streaming"
    SET = "set a condition"
    CLEAR = "clear a condition"
    TELL = "tell an event"
    SET_TIMER = "set a timer"
    CANCEL_TIMER = "cancel a timer"
    BREAK_LOCK = "look for an abandoned lock"
    UNBLOCK_SLOT = "look who blocks the slot"
    RESTART = "restart the connection subsystem"
    DROP_SLOT = "drop the slot, and restart"
    GIVE_UP = "stop: somebody must change something"


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    act: Act
    #: A condition, an event, or a timer.
    name: str = ""
    #: For a timer, a restart and a failure: in how many seconds it goes on.
    delay: float = 0.0
    #: Why; for people.
    detail: str = ""


Actions = list[Action]

_LOCKING = Step.ACQUIRE_LOCK
_ABOUT_CLIENT = tuple(
    f"{CLIENT}:{step}" for step in ("connecting", "acquiring_lock", "configuring_connection")
)
#: What does not hold without the replication connection, the last to hold first.
_OF_THE_STREAM = tuple(name for name in reversed(CONDITIONS) if "pool" not in name)
_BEFORE_LOCK = (Step.CONNECTED, Step.IDENTIFY_SYSTEM, Step.QUERY_PG_INFO)


class ManagerCore:
    """Where the connection subsystem is, and where it goes from there."""

    def __init__(self, machine: Machine, backoff: Backoff) -> None:
        self.machine = machine
        self.backoff = backoff
        self._ready: set[Role] = set()
        #: Whether a replication client has ever been set up: a slot is recreated once, not always.
        self.configured = False
        #: Whether it was ever active: then every outage may pass, and nothing is final.
        self.was_active = False

    def start(self, cause: str = "it was started") -> Actions:
        """Begin, or begin again."""
        if self.machine.history:
            self.machine.move("connection_setup", cause=cause)
        self._ready.clear()
        return self._start_client(cause)

    def _start_client(self, cause: str) -> Actions:
        self._move(f"{CLIENT}:connecting", cause)
        return [Action(Act.START_CLIENT)]

    # -- the replication client ----------------------------------------------------------------

    def client_at(self, step: Step) -> Actions:
        """The replication client has reached a step of its setup."""
        if step in _BEFORE_LOCK or step in (Step.START_STREAMING, Step.STREAMING):
            return []
        if step is _LOCKING:
            self._move(f"{CLIENT}:acquiring_lock", "it is connected")
            return [
                Action(Act.TELL, "waiting_for_connection_lock"),
                Action(Act.SET_TIMER, Timer.LOCK.value, FIRST_LOOK),
            ]
        actions: Actions = []
        if self.machine.step == f"{CLIENT}:acquiring_lock":
            actions += self._locked()
        if step is Step.READY_TO_STREAM:
            actions += self._configured()
        return actions

    def _locked(self) -> Actions:
        self._move(f"{CLIENT}:configuring_connection", "it has the lock")
        return [
            Action(Act.CANCEL_TIMER, Timer.LOCK.value),
            Action(Act.SET, "pg_lock_acquired"),
            Action(Act.TELL, "connection_lock_acquired"),
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
            self._move(f"{POOL}:connecting", "the pools are there")
            return [*actions, *self._pools_ready()]
        self._move(f"{POOL}:connecting", "the pools were started")
        return [*actions, Action(Act.START_POOLS)]

    def rewind(self) -> Actions:
        """A consumer came back for what only the server has: the stream begins again, at once."""
        if self.machine.phase != "running":
            return []  # it has not begun: it begins where it must
        self.machine.move("connection_setup", cause="a consumer came back")
        why = "the stream begins again for a consumer that came back"
        return [
            Action(Act.CANCEL_TIMER, Timer.LIVENESS.value),
            # The lock goes with the connection: another instance may have it in a moment.
            *(Action(Act.CLEAR, condition, detail=why) for condition in _OF_THE_STREAM),
            Action(Act.STOP_CLIENT),
            *self._start_client("a consumer came back"),
        ]

    # -- pools, integrity, streaming -----------------------------------------------------------

    def pool_ready(self, role: Role) -> Actions:
        """All connections of a pool are there."""
        actions = [Action(Act.SET, f"{role.value}_connection_pool_ready")]
        if role in self._ready:
            return actions
        self._ready.add(role)
        if self._ready == set(Role) and self.machine.step == f"{POOL}:connecting":
            actions += self._pools_ready()
        return actions

    def _pools_ready(self) -> Actions:
        self._move("start_shapes_supervisor", "both pools are ready")
        return [Action(Act.CHECK_INTEGRITY)]

    def pool_repopulating(self, role: Role, why: str) -> Actions:
        """A pool has lost a connection, and opens another; the subsystem goes on."""
        return [Action(Act.CLEAR, f"{role.value}_connection_pool_ready", detail=why)]

    def integrity_checked(self) -> Actions:
        """What is kept here belongs to this history, or was reset."""
        self._move(STREAM, "timeline, slot and publication were checked")
        self._move("waiting_for_streaming_confirmation", "it was told to stream")
        self.was_active = True
        return [
            Action(Act.SET, "integrity_checks_passed"),
            Action(Act.SET, "shape_log_collector_ready"),
            Action(Act.SET, "supervisor_processes_ready"),
            Action(Act.TELL, "ready"),
            Action(Act.START_STREAMING),
        ]

    def first_message(self) -> Actions:
        """The stream gave its first sign."""
        if self.machine.step != "waiting_for_streaming_confirmation":
            return []
        self._move("streaming", "the first message came")
        return [Action(Act.SET_TIMER, Timer.LIVENESS.value, LIVENESS)]

    def stalled(self, stalled: bool) -> Actions:
        """A consumer has stopped the others for too long, or reading goes on."""
        if self.machine.phase != "running":
            return []
        why = "reading is paused: a consumer takes nothing" if stalled else ""
        return [Action(Act.SET, "shape_log_collector_ready", detail=why)]

    # -- time ----------------------------------------------------------------------------------

    def timer(self, timer: Timer) -> Actions:
        """A timer has run out."""
        if timer is Timer.LIVENESS:
            self.backoff.succeed()
            return []
        if timer is Timer.RETRY:
            if self.machine.step == CLIENT:
                return self._start_client("the wait before the next try is over")
            self._move(f"{POOL}:connecting", "the wait before the next try is over")
            return [Action(Act.START_POOLS)]
        look = Act.BREAK_LOCK if timer is Timer.LOCK else Act.UNBLOCK_SLOT
        return [Action(look), Action(Act.SET_TIMER, timer.value, CHECK_EVERY)]

    # -- failures ------------------------------------------------------------------------------

    def client_failed(self, diagnosis: Diagnosis) -> Actions:
        """The replication client has ended with an error."""
        if self.machine.step not in _ABOUT_CLIENT:
            return self._failed(diagnosis) or self._restart(diagnosis)
        asked = self.machine.step == f"{CLIENT}:acquiring_lock"
        told = [Action(Act.TELL, "failed_to_acquire_connection_lock", detail=str(diagnosis))]
        return [
            *(told if asked else []),
            *(self._failed(diagnosis) or self._retry(CLIENT, diagnosis)),
        ]

    def pool_failed(self, role: Role, diagnosis: Diagnosis) -> Actions:
        """A pool cannot be filled."""
        if diagnosis.verdict is FaultVerdict.FATAL and self.was_active:
            # The pool tries again by itself, and the stream, if there is one, goes on.
            return self.pool_repopulating(role, str(diagnosis))
        if self.machine.step != f"{POOL}:connecting":
            return self._failed(diagnosis) or self._restart(diagnosis)
        return self._failed(diagnosis) or self._retry(POOL, diagnosis)

    def subsystem_failed(self, diagnosis: Diagnosis) -> Actions:
        """Something else has failed: everything begins again."""
        return self._failed(diagnosis) or self._restart(diagnosis)

    def _failed(self, diagnosis: Diagnosis) -> Actions:
        """What to do about an error that trying again cannot mend."""
        text = str(diagnosis)
        if diagnosis.verdict is FaultVerdict.FATAL and not self.was_active:
            return [Action(Act.TELL, "config_error", detail=text), Action(Act.GIVE_UP, detail=text)]
        if diagnosis.verdict is FaultVerdict.DROP_SLOT:
            return [Action(Act.TELL, "warning", detail=text), Action(Act.DROP_SLOT, detail=text)]
        return []

    def _restart(self, diagnosis: Diagnosis) -> Actions:
        wait = self.backoff.fail()
        return [self._told(diagnosis, wait), Action(Act.RESTART, "", wait, str(diagnosis))]

    def _retry(self, step: str, diagnosis: Diagnosis) -> Actions:
        """Try again in place, with the connection that this step is about."""
        wait = self.backoff.fail()
        self._move(step, str(diagnosis))
        actions = [self._told(diagnosis, wait), Action(Act.SET_TIMER, Timer.RETRY.value, wait)]
        if step == CLIENT:
            actions += [
                Action(Act.CANCEL_TIMER, Timer.LOCK.value),
                Action(Act.CANCEL_TIMER, Timer.CONFIGURATION.value),
                Action(Act.CLEAR, "pg_lock_acquired", detail=str(diagnosis)),
            ]
        return actions

    def _told(self, diagnosis: Diagnosis, wait: float) -> Action:
        return Action(Act.TELL, "connection_error", wait, str(diagnosis))

    def _move(self, to: str, cause: str) -> None:
        phase = "running" if to in RUNNING else "connection_setup"
        self.machine.move(f"{phase}/{to}", cause=cause)
