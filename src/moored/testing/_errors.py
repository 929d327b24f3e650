"""The errors of simulations, mutants and thread tests.

::

    SimulationError (a MooredError)
    ├── SimulationFailed   a seed of a scenario failed: the message has the seed, the cause and how
    │                      to repeat it
    ├── Stuck
    │   ├── Deadlock       no task is ready and no timer is set: the message lists what tasks await
    │   ├── Livelock       tasks keep running and virtual time does not advance
    │   └── TimeLimit      the scenario exceeded its limit of virtual time
    ├── Unretrieved        an exception of a task or callback was never retrieved
    ├── HostKilled         the simulated host was killed
    ├── Unsimulated        threads, processes, real sockets, TLS: not available in a simulation
    ├── MutantRejected     a defect could not be planted, or fails for the wrong reason
    └── MutantSurvived     every seed passed with the planted defect
    StressFailed (a MooredError): threads raised, broke an invariant, or did not end in time
"""

from __future__ import annotations

from moored.kernel import MooredError


class SimulationError(MooredError):
    """The base class of the errors of simulations and mutants."""


class SimulationFailed(SimulationError, AssertionError):
    """A seed of a scenario failed; the original error is the `__cause__`.

    `position` is the index of `seed` among the seeds, `trace` the last events, and `traceback` the
    formatted traceback of the original error.
    """

    trace = ""
    traceback = ""

    def __init__(self, message: str, *, seed: int, position: int) -> None:
        super().__init__(message)
        self.seed = seed
        self.position = position


class Stuck(SimulationError):
    """A schedule makes no progress; the message lists the tasks and what each awaits."""


class Deadlock(Stuck):
    """No task is ready and no timer is set, but the scenario has not ended."""


class Livelock(Stuck):
    """Tasks keep running, but virtual time does not advance."""


class TimeLimit(Stuck):
    """The scenario exceeded its limit of virtual time."""


class Unretrieved(SimulationError):
    """Exceptions of tasks or callbacks were never retrieved; the first is the `__cause__`."""


class HostKilled(SimulationError):
    """The simulated host that ran the coroutine was killed."""


class Unsimulated(SimulationError, NotImplementedError):
    """The scenario used a feature that cannot be simulated, because it is not deterministic."""


class MutantRejected(SimulationError):
    """A mutant could not be planted, or failed because it is written wrongly."""


class MutantSurvived(SimulationError, AssertionError):
    """A scenario passed although the defect was planted, so it does not test for the defect."""


class AppLeaked(MooredError, AssertionError):
    """An app has stopped, and tasks or sockets of it are left."""


class StressFailed(MooredError, AssertionError):
    """Threads raised, broke an invariant, or did not end in time."""
