"""`stress_threads`: races, exceptions and hangs are reported."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from moored.testing import StressFailed, stress_threads


class Counter:
    """A counter with an optional lock."""

    def __init__(self, *, locked: bool) -> None:
        self.value = 0
        self._lock = threading.Lock() if locked else None

    def add(self, thread: int, iteration: int) -> None:
        if self._lock is None:
            self._add()
        else:
            with self._lock:
                self._add()

    def _add(self) -> None:
        value = self.value
        # Release the interpreter lock here, so that the race does not depend on timing.
        time.sleep(0)
        self.value = value + 1


def test_an_unlocked_counter_is_caught() -> None:
    counter = Counter(locked=False)
    with pytest.raises(StressFailed, match="the invariant is broken"):
        stress_threads(
            counter.add, threads=8, iterations=200, invariant=lambda: counter.value == 8 * 200
        )


def test_a_locked_counter_passes() -> None:
    counter = Counter(locked=True)
    report = stress_threads(
        counter.add, threads=8, iterations=200, invariant=lambda: counter.value == 8 * 200
    )
    assert (report.threads, report.calls, report.checks) == (8, 1600, 0)
    assert str(report).startswith("1,600 calls by 8 threads in ")


def test_always_is_checked_while_the_threads_run() -> None:
    seen: list[int] = []
    counter = Counter(locked=True)

    def grows() -> None:
        seen.append(counter.value)
        assert seen == sorted(seen)

    report = stress_threads(counter.add, threads=4, iterations=500, always=grows)
    assert report.checks == len(seen) > 0

    def never() -> bool:
        return False

    with pytest.raises(
        StressFailed, match=r"the invariant `always` is broken: .*never\(\) is False"
    ):
        stress_threads(counter.add, threads=4, iterations=500, always=never)


def test_exceptions_of_all_threads_are_collected() -> None:
    barrier = threading.Barrier(4)

    def fail(thread: int, iteration: int) -> None:
        barrier.wait()
        raise LookupError(f"in thread {thread}")

    with pytest.raises(StressFailed, match=r"4 of 4 threads failed \(LookupError\)") as caught:
        stress_threads(fail, threads=4, iterations=10)
    assert "in thread" in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


def test_hung_threads_are_reported_with_their_stacks() -> None:
    release = threading.Event()

    def wait_for_nothing(thread: int, iteration: int) -> None:
        if thread == 1:
            release.wait()

    try:
        with pytest.raises(StressFailed, match="1 of 2 threads have not ended in time") as caught:
            stress_threads(wait_for_nothing, threads=2, iterations=1, timeout=0.2)
    finally:
        release.set()
    assert "stress-1:" in str(caught.value)
    assert "in wait_for_nothing" in str(caught.value)


def test_the_switch_interval_is_restored() -> None:
    before = sys.getswitchinterval()
    inside: list[float] = []
    stress_threads(lambda *_: inside.append(sys.getswitchinterval()), threads=2, iterations=1)
    assert inside == pytest.approx([1e-6, 1e-6])
    assert sys.getswitchinterval() == before
