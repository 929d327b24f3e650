"""Run many schedules of one scenario, in one process per CPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from ._errors import SimulationError
from ._loop import ScheduleOptions
from ._report import Report, failure
from ._run import Scenario, refuse_running_loop, run_one
from ._scale import base_seed
from ._workers import SeedResults, run_forked

__all__ = ["explore", "simulate"]

# For fewer seeds than this, forking costs more time than it saves.
_MIN_FORKED = 32


def simulate(
    scenario: Scenario[Any],
    seeds: int | Iterable[int] = 1000,
    *,
    processes: int | None = None,
    first_seed: int | None = None,
    **options: Unpack[ScheduleOptions],
) -> Report:
    """Run a scenario once per seed; raise `SimulationFailed` for the first seed that fails.

    The reported seed is always the first failing one in the order of the seeds, however the seeds
    were divided among processes. `MOORED_SIM_SEED=…` runs that seed alone, in this process, so that
    breakpoints work; `pytest --sim-seeds N` overrides `seeds` where it is a number.

    :param seeds: the number of seeds, or the seeds themselves.
    :param processes: the number of worker processes; by default one per CPU. Workers are forked, so
        the scenario may be any function, but its side effects stay in the worker.
    :param first_seed: the first seed when `seeds` is a number; by default MOORED_SEED.
    :param options: `drift`, `lateness`, `timer_slack` and `time_limit` of `SimLoop`.
    """
    chosen = _chosen(seeds, base_seed() if first_seed is None else first_seed)
    return explore(scenario, chosen, processes=processes, **options)


def explore(
    scenario: Scenario[Any],
    chosen: Sequence[int],
    *,
    processes: int | None = None,
    **options: Unpack[ScheduleOptions],
) -> Report:
    """Run exactly these seeds; ignore MOORED_SIM_SEED and --sim-seeds."""
    refuse_running_loop()
    count = _processes(processes, len(chosen))
    begin = time.perf_counter()
    if count > 1:
        results = run_forked(scenario, chosen, options, count)
    else:
        results = SeedResults.of(scenario, chosen, range(len(chosen)), options)
    seconds = time.perf_counter() - begin
    if results.failed is not None:
        _fail(scenario, chosen, results.failed, results.traceback_text, options)
    return Report(
        schedules=len(results.digests),
        distinct=len(set(results.digests.values())),
        seconds=seconds,
        processes=count,
        digest=results.digest(),
    )


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SimulationError(f"{variable}={text} must be a whole number") from None


def _chosen(seeds: int | Iterable[int], first: int) -> Sequence[int]:
    if only := os.environ.get("MOORED_SIM_SEED"):
        return [_number("MOORED_SIM_SEED", only)]
    if not isinstance(seeds, int):
        chosen: Sequence[int] = list(seeds)
    else:
        requested = os.environ.get("MOORED_SIM_SEEDS")
        count = _number("MOORED_SIM_SEEDS", requested) if requested else seeds
        chosen = range(first, first + count)
    if not chosen:
        raise SimulationError("no seeds: a simulation without seeds would always pass")
    return chosen


def _processes(requested: int | None, seeds: int) -> int:
    if not sys.platform.startswith("linux") or seeds < _MIN_FORKED:
        return 1
    if requested is None:
        # The workers of pytest-xdist run at the same time: each uses its share of the CPUs.
        sharers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1)
        requested = len(os.sched_getaffinity(0)) // sharers
    return max(1, min(requested, seeds // (_MIN_FORKED // 2)))


def _fail(
    scenario: Scenario[Any],
    seeds: Sequence[int],
    position: int,
    traceback_text: str,
    options: ScheduleOptions,
) -> None:
    """Repeat the failing seed in this process with a trace, and raise `SimulationFailed`."""
    seed = seeds[position]
    outcome = run_one(scenario, seed, trace=True, check=False, **options)
    if outcome.error is None:
        raise SimulationError(
            f"seed {seed} failed, but passes when it is repeated: the scenario depends on more "
            "than its seed (real time, os.urandom, the order of a set, state of an earlier run). "
            f"It failed with:\n{traceback_text}"
        )
    raise failure(outcome, position, len(seeds))
