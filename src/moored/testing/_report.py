"""The result of many schedules, and the error for a failed one."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ._errors import SimulationFailed
from ._run import Outcome

__all__ = ["Report", "failure"]

_TRACE_LINES = 40


@dataclass(frozen=True)
class Report:
    """The statistics of a scenario that passed on every seed."""

    #: The number of schedules.
    schedules: int
    #: The number of different schedules.
    distinct: int
    #: Real seconds.
    seconds: float
    #: Worker processes.
    processes: int
    #: A hash over all schedules: equal for equal seeds.
    digest: int

    @property
    def schedules_per_s(self) -> float:
        """Schedules per real second, over all processes."""
        return self.schedules / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.schedules:,} schedules, {self.distinct:,} distinct, in {self.seconds:.2f} s "
            f"({self.schedules_per_s:,.0f}/s, processes: {self.processes}); "
            f"digest {self.digest:016x}"
        )


def failure(outcome: Outcome[Any], position: int, total: int) -> SimulationFailed:
    """Return the error for a failed seed."""
    error, trace = outcome.error, outcome.trace
    assert error is not None
    text = "" if trace is None else trace.text(_TRACE_LINES)
    parts = [
        f"seed {outcome.seed} failed ({position + 1:,} of {total:,} schedules): {_brief(error)}",
        f"repeat it with: MOORED_SIM_SEED={outcome.seed} {_command()}",
    ]
    if trace is not None:
        shown = min(_TRACE_LINES, len(trace))
        parts.append(f"the last {shown} of {trace.total:,} events, by virtual second:\n{text}")
    failed = SimulationFailed("\n\n".join(parts), seed=outcome.seed, position=position)
    failed.trace = text
    failed.traceback = "".join(traceback.format_exception(error))
    failed.__cause__ = error
    return failed


def _brief(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _command() -> str:
    """Return the command that started this process, as far as it is known."""
    if test := os.environ.get("PYTEST_CURRENT_TEST"):
        return f"pytest '{test.rpartition(' (')[0]}'"
    return f"python {PurePath(sys.argv[0]).name or '…'}"
