"""Divide seeds among forked processes; the reported failure does not depend on the division."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from ._errors import SimulationError
from ._loop import ScheduleOptions
from ._run import Scenario, run_one

_JOIN_TIMEOUT = 5.0

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
    workers: dict[Connection, Any] = {}
    try:
        for start in range(count):
            here, there = context.Pipe(duplex=False)
            positions = range(start, len(seeds), count)
            process = context.Process(
                target=_work, args=(there, lowest, scenario, seeds, positions, options), daemon=True
            )
            _start(process)
            there.close()
            workers[here] = process
        return _collect(workers)
    finally:
        for here, process in workers.items():
            here.close()
            _end(process)


def _start(process: Any) -> None:
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork in a process with threads; these children only compute.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()


def _end(process: Any) -> None:
    process.join(0 if sys.exc_info()[0] else _JOIN_TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()


def _collect(workers: dict[Connection, Any]) -> SeedResults:
    results = SeedResults()
    waiting = list(workers)
    while waiting:
        for ready in wait(waiting):
            assert isinstance(ready, Connection)
            waiting.remove(ready)
            try:
                results.merge(ready.recv())
            except EOFError:
                workers[ready].join()
                raise SimulationError(
                    f"a worker died (exit code {workers[ready].exitcode}) in the middle of a "
                    "schedule: run with processes=1 to find the seed"
                ) from None
    return results


def _work(
    result: Connection,
    lowest: Any,
    scenario: Scenario[Any],
    seeds: Sequence[int],
    positions: Iterable[int],
    options: ScheduleOptions,
) -> None:
    # Ctrl-C reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wanted = takewhile(lambda position: position <= lowest.value, positions)
    results = SeedResults.of(scenario, seeds, wanted, options)
    if results.failed is not None:
        with lowest.get_lock():
            lowest.value = min(lowest.value, results.failed)
    result.send(results)
    result.close()
