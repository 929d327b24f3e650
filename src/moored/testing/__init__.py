"""Tools for tests, shipped so that users can test their own code with them.

- `simulate` runs a scenario on an event loop with virtual time and a seeded, faulty network, once
  per seed; `run_one` runs a single seed.
- `mutant` plants a named defect for one test, and `assert_caught` proves that a scenario notices.
- `stress_threads` drives a thread-safe object from many threads.
- `FaultProxy` is a TCP proxy between a client and a real server, with faults that tests switch.
- `running_app` runs an app in a test, and fails if it leaves tasks or sockets behind.
- `session_sandbox` is a session without a server, for tests of event handlers.
- `scaled` and `base_seed` set the size and the random seed of such tests for the whole run.

Invariants of every simulation:

- The same seed gives the same schedule, in any process.
- Callbacks keep asyncio's order; only tasks may be late. One connection's bytes keep their order.
- Virtual time advances only when nothing is ready to run; with no timer left, `Deadlock` is raised.
- An exception that is never retrieved fails the seed.
- A killed host runs no more code, not even a `finally` block.

Names are imported on first use: pytest imports this package at its start (for the plugin), and
should not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._app import running_app
    from ._errors import (
        AppLeaked,
        Deadlock,
        HostKilled,
        Livelock,
        MutantRejected,
        MutantSurvived,
        SimulationError,
        SimulationFailed,
        StressFailed,
        Stuck,
        TimeLimit,
        Unretrieved,
        Unsimulated,
    )
    from ._hosts import Host
    from ._loop import SimLoop
    from ._mutants import Caught, Mutant, assert_caught, mutant
    from ._network import Network
    from ._proxy import FaultProxy
    from ._report import Report
    from ._run import Outcome, Scenario, run_one
    from ._sandbox import SessionSandbox, session_sandbox
    from ._scale import base_seed, scaled
    from ._sim import Sim
    from ._simulate import simulate
    from ._stress import StressReport, stress_threads
    from ._trace import Trace, TraceEvent

__all__ = [  # noqa: RUF022 (grouped by use)
    # Simulation
    "Host",
    "Network",
    "Outcome",
    "Report",
    "Scenario",
    "Sim",
    "SimLoop",
    "Trace",
    "TraceEvent",
    "run_one",
    "simulate",
    # Mutants
    "Caught",
    "Mutant",
    "assert_caught",
    "mutant",
    # Threads
    "StressReport",
    "stress_threads",
    # Real connections
    "FaultProxy",
    # A whole app
    "running_app",
    # Sessions without a server
    "SessionSandbox",
    "session_sandbox",
    # Size and seed
    "base_seed",
    "scaled",
    # Errors
    "AppLeaked",
    "Deadlock",
    "HostKilled",
    "Livelock",
    "MutantRejected",
    "MutantSurvived",
    "SimulationError",
    "SimulationFailed",
    "StressFailed",
    "Stuck",
    "TimeLimit",
    "Unretrieved",
    "Unsimulated",
]

_HOMES = {
    "_app": "running_app",
    "_errors": (
        "AppLeaked Deadlock HostKilled Livelock MutantRejected MutantSurvived SimulationError "
        "SimulationFailed StressFailed Stuck TimeLimit Unretrieved Unsimulated"
    ),
    "_hosts": "Host",
    "_loop": "SimLoop",
    "_mutants": "Caught Mutant assert_caught mutant",
    "_network": "Network",
    "_proxy": "FaultProxy",
    "_report": "Report",
    "_run": "Outcome Scenario run_one",
    "_sandbox": "SessionSandbox session_sandbox",
    "_scale": "base_seed scaled",
    "_sim": "Sim",
    "_simulate": "simulate",
    "_stress": "StressReport stress_threads",
    "_trace": "Trace TraceEvent",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
