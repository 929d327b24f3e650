"""Workers for items with keys: in order within a key, concurrent across keys.

A key has a pump, which is one task, only while it has work: the pump starts with the first item and
ends in the same step in which it finds its queue empty. There is no idle timer, so an item cannot
be given to a worker that is about to end. A key without work takes no memory.

- The items of a key are handled one at a time, in the order in which they were submitted.
- Every item gets an outcome: its result, its error, or the reason why it was not handled.
- A handler that raises fails its own item, and the items that wait behind it with `WorkerCrashed`;
  other keys are not affected, and the next item for the key is handled as usual.
- The future of an item belongs to its caller. If the caller cancels it while the item waits, the
  item is skipped; if it runs already, it continues: only `cancel()` stops running items.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError, Future, Task, get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from ._errors import KeyedWorkError, QueueFull, WaitTimeout, WorkCancelled, WorkerCrashed
from ._pump import KeyedStatistics, Pump, fail
from ._tasks import start_task
from ._words import counted, describe, refuse

__all__ = ["KeyedStatistics", "KeyedWorkers"]

K = TypeVar("K", bound=Hashable)
ItemT = TypeVar("ItemT")
R = TypeVar("R")


class KeyedWorkers(Generic[K, ItemT, R]):
    """Runs `handler(key, item)` for each submitted item.

    `max_queue` limits the items that wait for one key, so that a stuck key raises `QueueFull`
    instead of filling the memory. A handler runs with the context variables of the caller that
    submitted the first item of the pump.
    """

    def __init__(
        self,
        handler: Callable[[K, ItemT], Awaitable[R]],
        *,
        max_queue: int = 1000,
        name: str = "workers",
    ) -> None:
        wrong = [] if max_queue >= 1 else [f"max_queue={max_queue!r} must be at least 1"]
        refuse(f"KeyedWorkers {name!r}", wrong)
        self.name = name
        self.max_queue = max_queue
        self._handler = handler
        self._pumps: dict[K, Pump[ItemT, R]] = {}
        self._unstarted: list[Pump[ItemT, R]] = []
        self._drained: list[Future[None]] = []
        self._closed = False
        self._submitted = self._rejected = self._completed = 0
        self._failed = self._crashed = self._cancelled = self._skipped = 0

    def submit(self, key: K, item: ItemT) -> Future[R]:
        """Queue the item behind the others of its key; returns the future of its outcome.

        Raises `QueueFull` if `max_queue` items wait already. The future need not be awaited:
        failures are counted.
        """
        if self._closed:
            raise KeyedWorkError(f"{self.name} is closed and accepts no more work")
        loop = get_running_loop()
        future: Future[R] = loop.create_future()
        pump = self._pumps.get(key)
        if pump is None:
            self._pumps[key] = pump = Pump(future)
            run = self._run(key, item, future, pump)
            pump.task = start_task(run, name=f"{self.name} {key!r}")
            if not self._unstarted:
                loop.call_soon(loop.call_soon, self._watch_unstarted)
            self._unstarted.append(pump)
        elif pump.queue is None:
            pump.queue = deque(((item, future),))
        elif len(pump.queue) < self.max_queue:
            pump.queue.append((item, future))
        else:
            self._rejected += 1
            raise QueueFull(
                f"{self.name}: {key!r} has {len(pump.queue)} items waiting behind the running one "
                f"(max_queue={self.max_queue}); wait until some have ended, or raise max_queue"
            )
        self._submitted += 1
        return future

    async def run(self, key: K, item: ItemT) -> R:
        """Submit the item and wait for its outcome."""
        return await self.submit(key, item)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until all work has ended; raises `WaitTimeout` if that takes too long."""
        if not self._pumps:
            return
        drained: Future[None] = get_running_loop().create_future()
        self._drained.append(drained)
        try:
            await asyncio.wait((drained,), timeout=timeout)
        finally:
            self._drained.remove(drained)
        if not drained.done():
            now = self.statistics()
            raise WaitTimeout(
                f"{self.name} still has {counted(now.keys, 'key')} at work and "
                f"{counted(now.queued, 'item')} waiting after {timeout} s; "
                "wait longer, or cancel() them"
            )

    def cancel(self, key: K | None = None) -> int:
        """Cancel the items of one key, or of all keys; returns the number of cancelled items.

        Waiting items fail with `WorkCancelled` at once. A running item is cancelled, and fails
        with `WorkCancelled` when its handler has ended; later items are handled after that.
        """
        if key is None:
            return sum(self.cancel(each) for each in list(self._pumps))
        pump = self._pumps.get(key)
        if pump is None:
            return 0
        cancelled = self._cancel_waiting(key, pump)
        if not pump.started:
            return cancelled
        if not pump.cancelling:
            pump.cancelling = True
            pump.task.cancel()
        return cancelled + 1

    async def close(self, timeout: float | None = None) -> None:
        """Refuse new items and wait for the others; cancel those that remain after the timeout."""
        self._closed = True
        try:
            await self.drain(timeout)
        except WaitTimeout:
            self.cancel()
            await self.drain()
        except CancelledError:
            self.cancel()
            raise

    def statistics(self) -> KeyedStatistics:
        """Return the counts of current and past items."""
        return KeyedStatistics(
            keys=len(self._pumps),
            queued=sum(len(pump.queue) for pump in self._pumps.values() if pump.queue),
            submitted=self._submitted,
            rejected=self._rejected,
            completed=self._completed,
            failed=self._failed,
            crashed=self._crashed,
            cancelled=self._cancelled,
            skipped=self._skipped,
        )

    async def __aenter__(self) -> KeyedWorkers[K, ItemT, R]:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close(timeout=None if kind is None else 0)

    def __contains__(self, key: object) -> bool:
        """Whether the key has work."""
        return key in self._pumps

    def __len__(self) -> int:
        """Return the number of keys that have work."""
        return len(self._pumps)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        now = self.statistics()
        closed = "closed, " if self._closed else ""
        return (
            f"<KeyedWorkers {self.name}: {closed}{counted(now.keys, 'key')} at work, "
            f"{now.queued} waiting, {now.completed} done, {now.failed} failed>"
        )

    async def _run(self, key: K, item: ItemT, future: Future[R], pump: Pump[ItemT, R]) -> None:
        # This loop is the hot path. It awaits only the handler: no other code can run between the
        # end of an item and the check of the queue.
        handler = self._handler
        pump.started = True
        while True:
            if not future.done():
                try:
                    result = await handler(key, item)
                except Exception as error:
                    return self._crash(key, pump, future, error)
                except CancelledError:
                    self._cancelled += 1
                    fail(future, self._cancellation(key, "while it ran"))
                    if not self._continue_after_cancel(key, pump):
                        return None
                except GeneratorExit:
                    raise  # the event loop has ended, and with it every waiter
                except BaseException as error:
                    self._crash(key, pump, future, error)
                    pump.task.add_done_callback(_mark_retrieved)
                    raise
                else:
                    self._completed += 1
                    if not future.done():
                        future.set_result(result)
                    if pump.cancelling and not await self._absorb_cancellation(key, pump):
                        return None
            elif future.cancelled():
                self._skipped += 1
            if not (queue := pump.queue):
                return self._stop(key)
            item, future = queue.popleft()

    def _stop(self, key: K) -> None:
        del self._pumps[key]
        if self._pumps:
            return
        self._pumps.clear()  # frees the memory of an emptied dict
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)

    def _crash(self, key: K, pump: Pump[ItemT, R], future: Future[R], error: BaseException) -> None:
        self._failed += 1
        fail(future, error)
        for each in pump.take_waiting():
            if each.cancelled():
                self._skipped += 1
                continue
            self._crashed += 1
            crashed = WorkerCrashed(
                f"{self.name}: an earlier item of {key!r} failed: {describe(error)}; "
                "this one was not started: submit it again if it is still needed"
            )
            crashed.__cause__ = error
            fail(each, crashed)
        self._stop(key)

    def _continue_after_cancel(self, key: K, pump: Pump[ItemT, R]) -> bool:
        """Whether `cancel()` ended the item; otherwise the whole task was cancelled: stop."""
        if pump.cancelling:
            pump.cancelling = False
            if pump.task.uncancel() == 0:
                return True
        # The loop is ending and cancels every task.
        self._cancel_waiting(key, pump)
        self._stop(key)
        return False

    async def _absorb_cancellation(self, key: K, pump: Pump[ItemT, R]) -> bool:
        # The item ended before the cancellation arrived, which must not hit the next item.
        try:
            await asyncio.sleep(0)
        except CancelledError:
            pass
        return self._continue_after_cancel(key, pump)

    def _cancel_waiting(self, key: K, pump: Pump[ItemT, R]) -> int:
        cancelled = 0
        for future in pump.take_waiting():
            if future.cancelled():
                self._skipped += 1
            else:
                cancelled += 1
                fail(future, self._cancellation(key, "before it was started"))
        self._cancelled += cancelled
        return cancelled

    def _cancellation(self, key: K, when: str) -> WorkCancelled:
        return WorkCancelled(f"{self.name}: an item of {key!r} was cancelled {when}")

    def _watch_unstarted(self) -> None:
        # A task that is cancelled before its first step never runs, not even a `finally`, so it
        # needs a callback. A callback on every task would add a tenth to the cost of an item; two
        # iterations of the loop after the submit, only unstarted tasks still need one.
        unstarted, self._unstarted = self._unstarted, []
        for pump in unstarted:
            if not pump.started:
                pump.task.add_done_callback(self._never_started)

    def _never_started(self, task: Task[None]) -> None:
        for key, pump in self._pumps.items():
            if pump.task is task:
                self._skipped += pump.first.cancelled()
                self._cancel_waiting(key, pump)
                return self._stop(key)
        return None


def _mark_retrieved(task: Task[None]) -> None:
    # The error was raised through the loop already: asyncio must not report it again.
    if not task.cancelled():
        task.exception()
