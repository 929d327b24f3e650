"""Divide seeds among forked processes; the reported failure does not depend on the division."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Self

from ._errors import SimulationError
from ._loop import ScheduleOptions
from ._run import Scenario, run_one

__all__ = ["SeedResults", "run_forked"]


@dataclass
class SeedResults:
    """The digests of the schedules that ran, by position, and the first failure."""

    digests: dict[int, int] = field(default_factory=dict)
    failed: int | None = None
    #: The traceback of that failure.
    traceback_text: str = ""

    @classmethod
    def of(
        cls,
        scenario: Scenario[Any],
        seeds: Sequence[int],
        positions: Iterable[int],
        options: ScheduleOptions,
    ) -> Self:
        """Run the seeds at these positions, up to the first that fails."""
        results = cls()
        for position in positions:
            outcome = run_one(scenario, seeds[position], check=False, **options)
            results.digests[position] = outcome.digest
            if outcome.error is not None:
                results.failed = position
                results.traceback_text = "".join(traceback.format_exception(outcome.error))
                break
        return results

    def digest(self) -> int:
        """Return a hash over all schedules, in the order of the seeds."""
        return (
            hash(tuple(self.digests[key] for key in sorted(self.digests))) & 0xFFFF_FFFF_FFFF_FFFF
        )

    def merge(self, other: SeedResults) -> None:
        """Add the results of another process."""
        self.digests |= other.digests
        if other.failed is not None and (self.failed is None or other.failed < self.failed):
            self.failed, self.traceback_text = other.failed, other.traceback_text


def run_forked(
    scenario: Scenario[Any], seeds: Sequence[int], options: ScheduleOptions, count: int
) -> SeedResults:
    """Run the seeds in `count` processes; worker k takes every count-th seed from k on."""
    context = multiprocessing.get_context("fork")
    # Each worker stops at the lowest failed position of all workers.
    lowest = context.Value("q", len(seeds))
    # Inherited by the fork, and not sent: a scenario may be any function.
    inherited = (lowest, scenario, seeds, options)
    results = SeedResults()
    # A finalizer may wait for a thread of this process, which a worker does not have.
    gc.collect()
    with (
        warnings.catch_warnings(),
        ProcessPoolExecutor(count, context, _inherit, inherited) as workers,
    ):
        # Python 3.12 warns of every fork in a process with threads; these children only compute.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            for each in workers.map(_work, [range(k, len(seeds), count) for k in range(count)]):
                results.merge(each)
        except BrokenProcessPool:
            raise SimulationError(
                "a worker died in the middle of a schedule: run with processes=1 to find the seed"
            ) from None
    return results


_inherited: tuple[Any, ...] = ()


def _inherit(*values: Any) -> None:
    global _inherited
    _inherited = values


def _work(positions: Iterable[int]) -> SeedResults:
    lowest, scenario, seeds, options = _inherited
    wanted = takewhile(lambda position: position <= lowest.value, positions)
    results = SeedResults.of(scenario, seeds, wanted, options)
    if results.failed is not None:
        with lowest.get_lock():
            lowest.value = min(lowest.value, results.failed)
    return results
