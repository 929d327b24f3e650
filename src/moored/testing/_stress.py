"""Threads that get in each other's way as often as the interpreter lets them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ._errors import StressFailed

__all__ = ["StressReport", "stress_threads"]

_SWITCH = 1e-6
_SHOWN = 3


@dataclass(frozen=True)
class StressReport:
    """What the threads did."""

    #: How many there were.
    threads: int
    #: Calls of the worker, by all of them.
    calls: int
    #: Real seconds that they took.
    seconds: float
    #: How often `always` was checked meanwhile.
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
    """Call `worker(thread, iteration)` from many threads at once, which switch every microsecond.

    Raises `StressFailed` with every exception of the threads, with what an invariant raised (or
    that it returned False), or with the stack of every thread when they do not end in time.

    :param invariant: checked once, when all threads have ended.
    :param always: checked again and again while they run, so it must itself be safe to call then.
    :param timeout: seconds after which the threads count as hung.
    """
    run = _Stress(worker, threads, iterations)
    begin = time.monotonic()
    with _eager_switching():
        run.start()
        checks = run.watch(always, begin + timeout)
    run.raise_failures()
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


class _Stress:
    def __init__(self, worker: Callable[[int, int], object], threads: int, iterations: int) -> None:
        self._worker = worker
        self._iterations = iterations
        self._barrier = threading.Barrier(threads)
        self._stop = threading.Event()
        self._errors: list[tuple[int, BaseException]] = []
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"stress-{n}", daemon=True)
            for n in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            self._barrier.wait()
            for iteration in range(self._iterations):
                if self._stop.is_set():
                    return
                self._worker(number, iteration)
        except BaseException as error:
            self._errors.append((number, error))
            self._stop.set()

    def watch(self, always: Callable[[], object] | None, deadline: float) -> int:
        """Wait for the threads, checking what must always hold; returns how often."""
        checks = 0
        try:
            for thread in self._threads:
                while thread.is_alive():
                    if time.monotonic() > deadline:
                        raise StressFailed(self._hung())
                    if always is not None:
                        _check(always, "what must always hold")
                        checks += 1
                    thread.join(0.0 if always is not None else 0.05)
        finally:
            self._stop.set()
        return checks

    def _hung(self) -> str:
        stuck = [thread for thread in self._threads if thread.is_alive()]
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.ident in frames
        ]
        return (
            f"{len(stuck)} of {len(self._threads)} threads have not ended in time; "
            "where each thread is:\n\n" + "\n".join(stacks)
        )

    def raise_failures(self) -> None:
        if not self._errors:
            return
        texts = [
            f"stress-{number}:\n" + "".join(traceback.format_exception(error))
            for number, error in self._errors[:_SHOWN]
        ]
        kinds = ", ".join(sorted({type(error).__name__ for _, error in self._errors}))
        raise StressFailed(
            f"{len(self._errors)} of {len(self._threads)} threads failed ({kinds}):\n\n"
            + "\n".join(texts)
        ) from self._errors[0][1]


def _check(invariant: Callable[[], object], what: str) -> None:
    try:
        held = invariant()
    except Exception as error:
        raise StressFailed(f"{what} is broken: {error!r}") from error
    if held is False:
        name = getattr(invariant, "__qualname__", repr(invariant))
        raise StressFailed(f"{what} is broken: {name}() is False")
