"""The errors of simulations, mutants and thread tests.

::

    SimulationError (a MooredError)
    ├── SimulationFailed   one seed of a scenario fails: says which, why, and how to repeat it
    ├── Stuck
    │   ├── Deadlock       nothing can run any more: says who waits for what
    │   ├── Livelock       tasks run and run, and the clock does not move
    │   └── TimeLimit      the scenario goes on for longer than it may, in virtual time
    ├── Unretrieved          an exception that nobody retrieved
    ├── HostKilled         the host that ran this was killed
    ├── Unsimulated        threads, processes, real sockets, TLS: a simulation has none of them
    ├── MutantRejected     the planted defect could not be planted, or is no test of anything
    └── MutantSurvived     no seed noticed the planted defect
    StressFailed           threads broke an invariant, raised, or hang
"""

from __future__ import annotations

from ..kernel._errors import MooredError

__all__ = [
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


class SimulationError(MooredError):
    """The root of what a simulation raises."""


class SimulationFailed(SimulationError, AssertionError):
    """One seed of a scenario fails; the original error is its `__cause__`.

    `seed` is the seed, `position` its place among the seeds (from 0), `trace` what happened last,
    and `traceback` the original error's, as text.
    """

    trace = ""
    traceback = ""

    def __init__(self, message: str, *, seed: int, position: int) -> None:
        super().__init__(message)
        self.seed = seed
        self.position = position


class Stuck(SimulationError):
    """A schedule makes no progress; the message says who waits for what."""


class Deadlock(Stuck):
    """Nothing can run any more and no timer is set, but the scenario has not ended."""


class Livelock(Stuck):
    """Tasks keep running, but virtual time does not move."""


class TimeLimit(Stuck):
    """The scenario needs more virtual time than it may take."""


class Unretrieved(SimulationError):
    """Exceptions that nobody retrieved, in tasks or in callbacks; the first is the `__cause__`."""


class HostKilled(SimulationError):
    """The simulated host on which this ran was killed."""


class Unsimulated(SimulationError, NotImplementedError):
    """Something that a simulation cannot have: it would not be the same for every run of a seed."""


class MutantRejected(SimulationError):
    """A mutant could not be planted, or its failure proves nothing."""


class MutantSurvived(SimulationError, AssertionError):
    """A scenario passes although the defect is planted, so it does not test what it should."""


class StressFailed(MooredError, AssertionError):
    """Threads raised, broke an invariant, or did not end in time."""
