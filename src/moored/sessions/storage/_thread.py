"""The thread of a storage, which makes the blocking calls in order and in groups.

Calls that arrive while the thread is busy are taken together when it is idle again, so that an
adapter can make many changes durable with one sync.
"""

from __future__ import annotations

import asyncio
import os
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

__all__ = ["Job", "StorageThread", "ThreadStorage", "settle", "sync_directory"]

T = TypeVar("T")

#: The most calls in a group: the first one waits for the last one.
MAX_GROUP = 1000


class Job:
    """One call for the thread, and its result."""

    __slots__ = ("call", "error", "future", "loop", "result", "writes")

    def __init__(self, call: Callable[[], Any], writes: bool, future: Future[Any]) -> None:
        self.call = call
        self.writes = writes
        self.future = future
        self.loop = future.get_loop()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call, and keep its result or its error."""
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
        # A daemon, so that a storage that was not closed does not keep the program alive.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T], *, writes: bool = True) -> Future[T]:
        """Make the call in the thread; cancelling the future does not stop the call."""
        if self._closed:
            raise StorageError("the storage is closed; open it again, or use it before closing it")
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
            # The last call is made alone, after all others.
            last = jobs.pop() if jobs[-1] is self._last else None
            self._do(jobs)
        last.run()
        settle((last,))

    def _do(self, jobs: list[Job]) -> None:
        try:
            self._carry_out(jobs)
        except BaseException as error:
            # A defect of the adapter: fail these jobs, and go on with the next ones.
            for job in jobs:
                job.error = error
            settle(jobs)


class ThreadStorage(Storage):
    """A storage at a path, whose calls are made in a thread of its own."""

    #: The exceptions of calls that fail because of the path or its contents.
    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._thread: StorageThread | None = None

    async def open(self) -> None:
        """Open the storage, or create it; raises `StorageError` with what to do."""
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
        """Close the storage, after all calls before this one."""
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
        """Run and settle a group of jobs."""

    @abstractmethod
    def _take(self) -> None:
        """Open the storage at the path; called in the thread."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close the storage if it was opened; called in the thread."""

    @abstractmethod
    def _advice(self, error: Exception) -> str:
        """Return what failed, and what to do about it."""


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def settle(jobs: Sequence[Job]) -> None:
    """Pass results to the waiting callers; called in the thread. Settled futures stay as is."""
    loops: dict[AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        loops.setdefault(job.loop, []).append(job)
    for loop, its_jobs in loops.items():
        try:
            loop.call_soon_threadsafe(_set_results, its_jobs)
        except RuntimeError:
            pass  # the loop is closed, and its callers are gone


def _set_results(jobs: Iterable[Job]) -> None:
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
