"""The one thread of a storage: what blocks is done there, in order, and in groups.

Whatever is asked for while the thread is busy waits, and is taken all together when the thread has
time again. An adapter that can make many changes durable at the price of one does so with such a
group.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import abstractmethod
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .._errors import StorageError
from ._storage import Storage

__all__ = ["Job", "StorageThread", "ThreadStorage", "settle"]

T = TypeVar("T")

#: A group is no larger, so that the first of it does not wait for ever.
MAX_GROUP = 1000


class Job:
    """One call for the thread, and what came of it."""

    __slots__ = ("call", "error", "future", "loop", "result", "writes")

    def __init__(self, call: Callable[[], Any], writes: bool, future: Future[Any]) -> None:
        self.call = call
        self.writes = writes
        self.future = future
        self.loop = future.get_loop()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call, and keep what came of it."""
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error


class StorageThread:
    """A daemon thread that hands groups of jobs to `carry_out`, which settles each of them once."""

    def __init__(self, name: str, carry_out: Callable[[list[Job]], None]) -> None:
        self._carry_out = carry_out
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._last: Job | None = None
        self._closed = False
        # A daemon, so that a storage that nobody closed does not keep the program alive.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T], *, writes: bool = True) -> Future[T]:
        """Have the call made in the thread; a future that is cancelled does not call it back."""
        if self._closed:
            raise StorageError("the storage is closed; open it again, or use it before the end")
        future: Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(Job(call, writes, future))
        return future

    def end(self, call: Callable[[], None]) -> Future[None]:
        """Make this last call, after all others, and end the thread."""
        future: Future[None] = asyncio.get_running_loop().create_future()
        self._closed = True
        self._last = Job(call, False, future)
        self._jobs.put(self._last)
        return future

    def _run(self) -> None:
        last = None
        while last is None:
            jobs = [self._jobs.get()]
            while len(jobs) < MAX_GROUP and not self._jobs.empty():
                jobs.append(self._jobs.get())
            # It is alone: what others asked for must be done when it is.
            last = jobs.pop() if jobs[-1] is self._last else None
            self._do(jobs)
        last.run()
        settle((last,))

    def _do(self, jobs: list[Job]) -> None:
        try:
            self._carry_out(jobs)
        except BaseException as error:
            # A defect of the adapter: who waits must be told, and the others served.
            for job in jobs:
                job.error = error
            settle(jobs)


class ThreadStorage(Storage):
    """A storage at a path, whose calls are made in a thread of its own."""

    #: What the calls raise when the path cannot be used.
    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._thread: StorageThread | None = None

    async def open(self) -> None:
        """Open the storage, or make it; raises `StorageError` that says what to do."""
        if self._thread is not None:
            return
        thread = self._thread = StorageThread(f"moored {self.path.name}", self._carry_out)
        try:
            await self._do(self._take, writes=False)
        except BaseException:
            self._thread = None
            thread.end(self._let_go).add_done_callback(_seen)
            raise

    async def close(self) -> None:
        """Close the storage, after everything that was asked for is done."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.end(self._let_go)

    async def _do(self, call: Callable[[], T], *, writes: bool = True) -> T:
        """Make a call in the thread."""
        if self._thread is None:
            raise StorageError(f"{self.path} is not open: use `async with` on the storage")
        try:
            return await self._thread.submit(call, writes=writes)
        except self._failures as error:
            raise StorageError(f"{self.path}: {self._advice(error)}") from error

    def __repr__(self) -> str:
        state = "open" if self._thread is not None else "closed"
        return f"<{type(self).__name__} {self.path}: {state}>"

    @abstractmethod
    def _carry_out(self, jobs: list[Job]) -> None:
        """Do and settle a group of jobs."""

    @abstractmethod
    def _take(self) -> None:
        """Open what is at the path."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close it, if it was opened."""

    @abstractmethod
    def _advice(self, error: Exception) -> str:
        """What is wrong with the path, and what to do."""


def settle(jobs: Sequence[Job]) -> None:
    """Tell those who wait; from the thread. What was told already stays as it is."""
    loops: dict[AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        loops.setdefault(job.loop, []).append(job)
    for loop, its_jobs in loops.items():
        try:
            loop.call_soon_threadsafe(_tell, its_jobs)
        except RuntimeError:
            # The loop has ended, and with it everybody who wanted to know.
            pass


def _tell(jobs: Iterable[Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(job.error)


def _seen(future: Future[Any]) -> None:
    """Retrieve the error of a future that is not awaited."""
    if not future.cancelled():
        future.exception()
