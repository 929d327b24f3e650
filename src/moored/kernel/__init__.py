"""The kernel: the parts that every long-lived connection needs, with the standard library alone.

A component of a system is a `Child` of a `Supervisor`: started in order, restarted by rule, stopped
in reverse order. Other components find it through a `Registry`. It shows its state with a `Machine`
and a `StatusMonitor`, keeps its link by the rules of a `Reconnect`, waits between attempts with a
`Backoff`, and records what happened and why in a `Recorder`. The other classes (`SingleFlight`,
`Generation`, `Deadline`, `KeyedWorkers`, `Tasks`, `Timers`, `Clock`) are small tools that every
other package uses.
"""

from ._at_fork import at_fork
from ._backoff import Backoff
from ._chart import Chart
from ._child import Child, Context
from ._clock import Clock
from ._condition import Condition, StatusChange
from ._deadline import Deadline
from ._errors import (
    AlreadyRegistered,
    BackoffExhausted,
    ConfigError,
    DeadlineExceeded,
    FlightCancelled,
    IllegalMove,
    KeyedWorkError,
    MooredError,
    NotRegistered,
    NotRunning,
    QueueFull,
    RestartIntensityExceeded,
    RestartRequested,
    StaleGeneration,
    StartFailed,
    SupervisionError,
    WaitTimeout,
    WorkCancelled,
    WorkerCrashed,
)
from ._extras import MissingExtra, extra
from ._flight import SingleFlight
from ._frames import forget_frames
from ._generation import Generation
from ._keyed import KeyedStatistics, KeyedWorkers
from ._link import Callers, Link
from ._loop_thread import LoopThread
from ._machine import Machine, Move
from ._reconnect import At, Dial, Loss, Pauses, Reconnect, link_chart
from ._recorder import Event, Recorder, RecorderStatistics
from ._registry import Down, Registration, Registry, Via
from ._rules import AutoShutdown, Failure, Restart, Strategy
from ._secrets import HIDDEN, SECRETS, Secrets, redacted, unescaped_password
from ._signals import SignalCall, call_on_signals
from ._state import State
from ._status import StatusMonitor
from ._supervisor import Supervisor
from ._tasks import Tasks, awaited, is_cancelled, outliving, raise_if_cancelled, start_task
from ._threads import in_thread, run_callback, start_thread
from ._timers import Timers, sleep_until
from ._tree import Tree
from ._waiting import all_of, cut_socket, first_of, patiently, uncancelled
from ._words import counted, describe, duration, refuse, unmet

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Supervision
    "AutoShutdown",
    "Child",
    "Context",
    "Failure",
    "Restart",
    "Strategy",
    "Supervisor",
    "Tree",
    # Names
    "Down",
    "Registration",
    "Registry",
    "Via",
    # State
    "Callers",
    "Chart",
    "Condition",
    "Link",
    "Machine",
    "Move",
    "State",
    "StatusChange",
    "StatusMonitor",
    # Work
    "KeyedStatistics",
    "KeyedWorkers",
    "LoopThread",
    "SignalCall",
    "SingleFlight",
    "Tasks",
    "all_of",
    "at_fork",
    "awaited",
    "cut_socket",
    "call_on_signals",
    "first_of",
    "in_thread",
    "is_cancelled",
    "outliving",
    "patiently",
    "raise_if_cancelled",
    "run_callback",
    "start_task",
    "start_thread",
    "uncancelled",
    # Time and replacement
    "At",
    "Backoff",
    "Clock",
    "Deadline",
    "Dial",
    "Generation",
    "Loss",
    "Pauses",
    "Reconnect",
    "Timers",
    "link_chart",
    "sleep_until",
    # Events
    "Event",
    "Recorder",
    "RecorderStatistics",
    # Texts and errors
    "counted",
    "describe",
    "duration",
    "forget_frames",
    "refuse",
    "unmet",
    # Extras
    "MissingExtra",
    "extra",
    # Secrets
    "HIDDEN",
    "SECRETS",
    "Secrets",
    "redacted",
    "unescaped_password",
    # Errors
    "AlreadyRegistered",
    "BackoffExhausted",
    "ConfigError",
    "DeadlineExceeded",
    "FlightCancelled",
    "IllegalMove",
    "KeyedWorkError",
    "MooredError",
    "NotRegistered",
    "NotRunning",
    "QueueFull",
    "RestartIntensityExceeded",
    "RestartRequested",
    "StaleGeneration",
    "StartFailed",
    "SupervisionError",
    "WaitTimeout",
    "WorkCancelled",
    "WorkerCrashed",
]
