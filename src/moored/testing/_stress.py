"""Run a function in many threads that switch as often as the interpreter allows."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from moored.kernel import start_thread

from ._errors import StressFailed

__all__ = ["StressReport", "stress_threads"]

_SWITCH = 1e-6
_SHOWN = 3


@dataclass(frozen=True)
class StressReport:
    """The statistics of a stress test that passed."""

    #: The number of threads.
    threads: int
    #: Calls of the worker, by all threads.
    calls: int
    #: Real seconds.
    seconds: float
    #: How often `always` was checked.
    checks: int

    def __str__(self) -> str:
        rate = self.calls / self.seconds if self.seconds else 0.0
        calls = f"{self.calls:,} calls by {self.threads} threads"
        return f"{calls} in {self.seconds:.2f} s ({rate:,.0f}/s)"


def stress_threads(
    worker: Callable[[int, int], object],
    *,
    threads: int = 8,
    iterations: int = 1000,
    invariant: Callable[[], object] | None = None,
    always: Callable[[], object] | None = None,
    timeout: float = 60.0,
) -> StressReport:
    """Call `worker(thread, iteration)` from many threads at once, switching every microsecond.

    Raise `StressFailed` if a thread raises, if an invariant raises or returns False, or (with the
    stack of every thread) if the threads do not end in time.

    :param invariant: checked once, when all threads have ended.
    :param always: checked repeatedly while the threads run, so it must be thread-safe.
    :param timeout: seconds after which the threads count as hung.
    """
    barrier, stop = threading.Barrier(threads), threading.Event()

    def run(number: int) -> None:
        try:
            barrier.wait()
            for iteration in range(iterations):
                if stop.is_set():
                    return
                worker(number, iteration)
        except BaseException:
            stop.set()
            raise

    begin = time.monotonic()
    with _eager_switching():
        running = [start_thread(partial(run, n), name=f"stress-{n}") for n in range(threads)]
        try:
            checks = _watch(running, always, begin + timeout)
        finally:
            stop.set()
    _raise_failures(running)
    if invariant is not None:
        _check(invariant, "the invariant")
    return StressReport(threads, threads * iterations, time.monotonic() - begin, checks)


@contextmanager
def _eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _watch(
    running: list[Future[None]], always: Callable[[], object] | None, deadline: float
) -> int:
    """Wait for the threads and check `always` meanwhile; return the number of checks."""
    checks = 0
    while pending := [each for each in running if not each.done()]:
        if time.monotonic() > deadline:
            raise StressFailed(
                f"{len(pending)} of {len(running)} threads have not ended in time; "
                f"where each thread is:\n\n{_stacks()}"
            )
        if always is not None:
            _check(always, "the invariant `always`")
            checks += 1
        wait(pending, 0.0 if always is not None else 0.05)
    return checks


def _stacks() -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.ident in frames
    )


def _raise_failures(ended: list[Future[None]]) -> None:
    failures = [(n, error) for n, each in enumerate(ended) if (error := each.exception())]
    if not failures:
        return
    texts = [
        f"stress-{number}:\n" + "".join(traceback.format_exception(error))
        for number, error in failures[:_SHOWN]
    ]
    kinds = ", ".join(sorted({type(error).__name__ for _, error in failures}))
    raise StressFailed(
        f"{len(failures)} of {len(ended)} threads failed ({kinds}):\n\n" + "\n".join(texts)
    ) from failures[0][1]


def _check(invariant: Callable[[], object], what: str) -> None:
    try:
        held = invariant()
    except Exception as error:
        raise StressFailed(f"{what} is broken: {error!r}") from error
    if held is False:
        name = getattr(invariant, "__qualname__", repr(invariant))
        raise StressFailed(f"{what} is broken: {name}() is False")
