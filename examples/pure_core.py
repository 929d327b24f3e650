"""A pure core with two shells: a gate that limits the rate of callers.

`Gate` decides. `AsyncGate` and `ThreadGate` wait and wake. `refilling` is background work, written
once: it runs on the user's event loop under asyncio, on the library's loop thread under threads.

Expected output:

    asyncio: a b c d e passed in their order
    threads: 5 passed, no faster than allowed
    threads: one more gave up after a moment and took nothing with it
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from moored.kernel import Clock, LoopThread

T = TypeVar("T")


# The core: plain methods that take the event and the time, and return what to do


class Gate(Generic[T]):
    """Lets `burst` callers through at once and then one per `period`, in order of arrival.

    A caller is any object: the asyncio shell queues futures, the thread shell events. Every method
    returns the callers that may pass now.
    """

    def __init__(self, *, burst: int, period: float, now: float) -> None:
        self.burst = burst
        self.period = period
        self._tokens = burst
        self._filled_at = now
        self._waiting: deque[T] = deque()

    def arrive(self, caller: T, now: float) -> list[T]:
        """Add a caller."""
        self._waiting.append(caller)
        return self._decide(now)

    def leave(self, caller: T, now: float) -> list[T]:
        """Remove a caller that gave up; if it was let through already, return its token."""
        if caller in self._waiting:
            self._waiting.remove(caller)
        else:
            self._tokens = min(self.burst, self._tokens + 1)
        return self._decide(now)

    def refill(self, now: float) -> list[T]:
        """Add the tokens of the time that has passed."""
        return self._decide(now)

    def _decide(self, now: float) -> list[T]:
        # The one place that looks at the whole state: tokens, time and waiting callers.
        due = int((now - self._filled_at) / self.period)
        self._filled_at += due * self.period
        self._tokens = min(self.burst, self._tokens + due)
        passing = [self._waiting.popleft() for _ in range(min(self._tokens, len(self._waiting)))]
        self._tokens -= len(passing)
        return passing


# The background work: async, written once for both shells


async def refilling(refill: Callable[[], None], period: float) -> None:
    """Call `refill` every `period` seconds."""
    while True:
        await asyncio.sleep(period)
        refill()


# The asyncio shell: calls the core on the event loop, so that calls never interleave


class AsyncGate:
    """The gate for coroutines."""

    def __init__(self, *, burst: int, period: float) -> None:
        self._clock = Clock.current()
        now = self._clock.monotonic()
        self._core: Gate[asyncio.Future[None]] = Gate(burst=burst, period=period, now=now)

    async def enter(self) -> None:
        """Wait until this caller may pass."""
        caller: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake(self._core.arrive(caller, self._clock.monotonic()))
        try:
            await caller
        except asyncio.CancelledError:
            self._wake(self._core.leave(caller, self._clock.monotonic()))
            raise

    async def __aenter__(self) -> AsyncGate:
        self._refilling = asyncio.create_task(refilling(self._refill, self._core.period))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._refilling.cancel()
        await asyncio.wait((self._refilling,))

    def _refill(self) -> None:
        self._wake(self._core.refill(self._clock.monotonic()))

    @staticmethod
    def _wake(callers: list[asyncio.Future[None]]) -> None:
        for caller in callers:
            if not caller.done():
                caller.set_result(None)


# The thread shell: a lock around each call of the core, and nothing else under it


class ThreadGate:
    """The gate for threads."""

    def __init__(self, *, burst: int, period: float) -> None:
        self._clock = Clock.system()
        self._lock = threading.Lock()
        now = self._clock.monotonic()
        self._core: Gate[threading.Event] = Gate(burst=burst, period=period, now=now)

    def enter(self, timeout: float | None = None) -> bool:
        """Wait until this caller may pass; return False after the timeout."""
        caller = threading.Event()
        with self._lock:
            passing = self._core.arrive(caller, self._clock.monotonic())
        self._wake(passing)
        if caller.wait(timeout):
            return True
        with self._lock:
            passing = self._core.leave(caller, self._clock.monotonic())
        self._wake(passing)
        return False

    def __enter__(self) -> ThreadGate:
        work = refilling(self._refill, self._core.period)
        self._refilling: Future[None] = LoopThread.shared().spawn(work, name="gate refilling")
        return self

    def __exit__(self, *_: object) -> None:
        self._refilling.cancel()

    def _refill(self) -> None:
        with self._lock:
            passing = self._core.refill(self._clock.monotonic())
        self._wake(passing)

    @staticmethod
    def _wake(callers: list[threading.Event]) -> None:
        for caller in callers:
            caller.set()


# Both in use


async def with_asyncio() -> None:
    """Let five coroutines pass, two at once and the rest one by one."""
    passed: list[str] = []

    async def visit(name: str) -> None:
        await gate.enter()
        passed.append(name)

    async with AsyncGate(burst=2, period=0.01) as gate:
        await asyncio.gather(*(visit(name) for name in "abcde"))
    print("asyncio:", *passed, "passed in their order")


def with_threads() -> None:
    """Let five threads pass likewise, and one more time out."""
    begin = Clock.system().monotonic()
    with ThreadGate(burst=2, period=0.01) as gate, ThreadPoolExecutor(5) as pool:
        passed = sum(pool.map(lambda _: gate.enter(), range(5)))
    speed = "no faster" if Clock.system().monotonic() - begin >= 3 * 0.01 else "faster"
    print(f"threads: {passed} passed, {speed} than allowed")

    with ThreadGate(burst=1, period=60) as gate:
        gate.enter()
        if not gate.enter(timeout=0.01):
            print("threads: one more gave up after a moment and took nothing with it")


if __name__ == "__main__":
    asyncio.run(with_asyncio())
    with_threads()
