"""Work in order per key, at the same time across keys, and nothing kept for a key without work.

A key has a pump, one task, only while it has work: it starts with the first item and ends in the
very step in which it finds its queue empty. There is no idle timer, and so no moment at which an
item can be handed to a worker that has just decided to stop.

- The items of a key are handled one at a time, in the order in which they were submitted.
- Every item gets an outcome: its result, its error, or the reason why it was not done.
- A handler that raises fails its own item, and with `WorkerCrashed` everything that waits behind
  it; other keys notice nothing, and the next item for the key starts afresh.
- The future of an item belongs to its caller. Cancelled while it waits, the item is skipped.
  Cancelled while it runs, the work goes on: only `cancel()` stops work.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError, Future, Task, get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from ._errors import KeyedWorkError, QueueFull, WaitTimeout, WorkCancelled, WorkerCrashed
from ._recorder import Recorder
from ._words import counted, describe, refuse

__all__ = ["KeyedStatistics", "KeyedWorkers"]

K = TypeVar("K", bound=Hashable)
ItemT = TypeVar("ItemT")
R = TypeVar("R")


class KeyedStatistics(NamedTuple):
    """What keyed workers do now, and what became of everything submitted so far."""

    #: Keys that have work.
    keys: int
    #: Items that wait behind the running one of their key.
    queued: int
    #: Items accepted so far.
    submitted: int
    #: Items refused because the queue of their key was full.
    rejected: int
    #: Items whose handler returned.
    completed: int
    #: Items whose handler raised.
    failed: int
    #: Items not started because the item before them failed.
    crashed: int
    #: Items ended by `cancel()`, or by the end of the loop.
    cancelled: int
    #: Items not started because their caller had cancelled them.
    skipped: int


class _Pump(Generic[ItemT, R]):
    """What is kept for a key while it has work."""

    __slots__ = ("cancelling", "first", "queue", "started", "task")

    def __init__(self, first: Future[R]) -> None:
        self.first = first
        self.started = False
        self.cancelling = False
        # Most keys have one item at a time: the queue is made for the second.
        self.queue: deque[tuple[ItemT, Future[R]]] | None = None
        self.task: Task[None]

    def waiting(self) -> list[Future[R]]:
        """The futures of what has not been started, taken out of the queue."""
        futures = [future for _, future in self.queue or ()]
        if self.queue:
            self.queue.clear()
        return futures if self.started else [self.first, *futures]


class KeyedWorkers(Generic[K, ItemT, R]):
    """Runs `handler(key, item)` for each submitted item.

    `max_queue` bounds what waits for one key, so that a stuck key fails its callers instead of
    filling the memory. With a recorder, failures are recorded under `name`. A handler runs with
    the context variables of whoever submitted the item that started the pump.
    """

    def __init__(
        self,
        handler: Callable[[K, ItemT], Awaitable[R]],
        *,
        max_queue: int = 1000,
        name: str = "workers",
        recorder: Recorder | None = None,
    ) -> None:
        wrong = [] if max_queue >= 1 else [f"max_queue={max_queue!r} must be at least 1"]
        refuse(f"KeyedWorkers {name!r}", wrong)
        self.name = name
        self.max_queue = max_queue
        self._handler = handler
        self._recorder = recorder
        self._pumps: dict[K, _Pump[ItemT, R]] = {}
        self._drained: list[Future[None]] = []
        self._closed = False
        self._submitted = self._rejected = self._completed = 0
        self._failed = self._crashed = self._cancelled = self._skipped = 0

    def submit(self, key: K, item: ItemT) -> Future[R]:
        """Queue the item behind the others of its key; returns the future of its outcome.

        Raises `QueueFull` if as many items wait as may. A future that nobody reads is no error:
        failures are counted, and recorded if there is a recorder.
        """
        if self._closed:
            raise KeyedWorkError(f"{self.name} is closed: it takes no more work")
        loop = get_running_loop()
        future: Future[R] = loop.create_future()
        pump = self._pumps.get(key)
        if pump is None:
            self._pumps[key] = pump = _Pump(future)
            run = self._run(key, item, future, pump)
            pump.task = loop.create_task(run, name=f"{self.name} {key!r}")
            pump.task.add_done_callback(self._ended)
        elif pump.queue is None:
            pump.queue = deque(((item, future),))
        elif len(pump.queue) < self.max_queue:
            pump.queue.append((item, future))
        else:
            self._rejected += 1
            raise QueueFull(
                f"{self.name}: {key!r} has {len(pump.queue)} items waiting behind the one that "
                f"runs (max_queue={self.max_queue}); wait for some to end, or raise max_queue"
            )
        self._submitted += 1
        return future

    async def run(self, key: K, item: ItemT) -> R:
        """Submit the item and wait for its outcome."""
        return await self.submit(key, item)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until there is nothing left to do; raises `WaitTimeout` if that takes too long."""
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
        """Cancel the work of one key, or of all; returns how many items that were.

        What waits fails with `WorkCancelled` at once; what runs is cancelled, and fails likewise
        when its handler has ended. Work submitted from now on is done after that.
        """
        if key is None:
            return sum(self.cancel(each) for each in list(self._pumps))
        pump = self._pumps.get(key)
        if pump is None:
            return 0
        waiting = [future for future in pump.waiting() if not future.done()]
        self._give_up(waiting, key, "before it was started")
        if not pump.started:
            return len(waiting)
        if not pump.cancelling:
            pump.cancelling = True
            pump.task.cancel()
        return len(waiting) + 1

    async def close(self, timeout: float | None = None) -> None:
        """Take no more work, and wait for what there is; cancel what is left after the timeout."""
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
        """What is being done and what has been done."""
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(timeout=None if kind is None else 0)

    def __len__(self) -> int:
        """How many keys have work."""
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

    async def _run(self, key: K, item: ItemT, future: Future[R], pump: _Pump[ItemT, R]) -> None:
        # This loop is the hot path. It waits nowhere but in the handler: between the end of an
        # item and the look at the queue nobody else can run.
        handler = self._handler
        pump.started = True
        while True:
            if not future.done():
                try:
                    result = await handler(key, item)
                except Exception as error:
                    self._crash(key, pump, future, error)
                    return
                except CancelledError:
                    if not self._was_cancelled(key, pump, future):
                        return
                except BaseException as error:
                    self._crash(key, pump, future, error)
                    raise
                else:
                    self._completed += 1
                    if not future.done():
                        future.set_result(result)
                    if pump.cancelling:
                        await self._absorb(pump)
            elif future.cancelled():
                self._skipped += 1
            if not pump.queue:
                break
            item, future = pump.queue.popleft()
        self._stop(key)

    def _stop(self, key: K) -> None:
        del self._pumps[key]
        if self._drained and not self._pumps:
            for drained in self._drained:
                if not drained.done():
                    drained.set_result(None)

    def _crash(
        self, key: K, pump: _Pump[ItemT, R], future: Future[R], error: BaseException
    ) -> None:
        self._failed += 1
        _fail(future, error)
        waiting = [each for each in pump.waiting() if not each.done()]
        for each in waiting:
            crashed = WorkerCrashed(
                f"{self.name}: the work of {key!r} before this one failed: {describe(error)}; "
                "this one was not started: submit it again if it is still wanted"
            )
            crashed.__cause__ = error
            _fail(each, crashed)
        self._crashed += len(waiting)
        if self._recorder is not None:
            text = f"the work of {key!r} failed, {len(waiting)} more not started"
            self._recorder.record(self.name, text, kind="failure", cause=error)
        self._stop(key)

    def _was_cancelled(self, key: K, pump: _Pump[ItemT, R], future: Future[R]) -> bool:
        """Whether the pump may go on, because it was `cancel()` that ended the item."""
        self._give_up([future], key, "while it ran")
        if pump.cancelling:
            pump.cancelling = False
            if pump.task.uncancel() == 0:
                return True
        # Somebody else ends the task, as the loop does at its end: nobody will do the rest.
        self._give_up(pump.waiting(), key, "before it was started")
        self._stop(key)
        return False

    async def _absorb(self, pump: _Pump[ItemT, R]) -> None:
        # The item ended before the cancellation reached it; here it does not hit the next one.
        try:
            await asyncio.sleep(0)
        except CancelledError:
            pass
        pump.task.uncancel()
        pump.cancelling = False

    def _give_up(self, futures: list[Future[R]], key: K, when: str) -> None:
        self._cancelled += len(futures)
        for future in futures:
            _fail(future, WorkCancelled(f"{self.name}: the work of {key!r} was cancelled {when}"))

    def _ended(self, task: Task[None]) -> None:
        if not task.cancelled():
            # A KeyboardInterrupt has gone up through the loop already.
            task.exception()
            return
        for key, pump in self._pumps.items():
            if pump.task is task:
                # It was cancelled before its first step, and so never came to its own end.
                self._give_up(pump.waiting(), key, "before it was started")
                self._stop(key)
                return


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        # Marks it as seen: a caller that dropped the future is not complained about at exit.
        future.exception()
