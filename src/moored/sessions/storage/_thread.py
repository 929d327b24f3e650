"""A storage whose blocking calls are made in a thread, in order and in groups.

Calls that arrive while the thread is busy are taken together when it is idle again, so that an
adapter can make many changes durable with one sync.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from moored.kernel import in_thread

from .._errors import StorageError
from ._storage import Storage

__all__ = ["Job", "ThreadStorage", "sync_directory"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Job:
    """One call for the thread, and its result."""

    call: Callable[[], Any]
    future: asyncio.Future[Any]
    #: Whether it changes the storage; None if it opens or closes it, and must be alone.
    writes: bool | None
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Make the call, and keep its result or its error."""
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error


class ThreadStorage(Storage):
    """A storage at a path, whose calls are made in a thread; for one event loop at a time."""

    #: The exceptions of calls that fail because of the path or its contents.
    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    #: The most calls in a group: the first one waits for the last one.
    _max_group: ClassVar[int] = 1

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # The calls that wait for the thread, and whether it makes others now.
        self._jobs: list[Job] = []
        self._busy = False

    async def open(self) -> None:
        """Open the storage, or create it; raises `StorageError` with what to do."""
        if self._is_open:
            return
        self._is_open = True
        try:
            await self._do(self._take, writes=None)
        except BaseException:
            self._end()
            raise

    async def close(self) -> None:
        """Close the storage, after all calls before this one."""
        if self._is_open:
            await self._end()

    def _end(self) -> asyncio.Future[None]:
        self._is_open = False
        return self._submit(self._let_go, None)

    async def _do(self, call: Callable[[], T], *, writes: bool | None = True) -> T:
        """Make a call in the thread; it is also made if its caller is cancelled."""
        if not self._is_open:
            raise StorageError(f"{self.path} is not open: use `async with` on the storage")
        try:
            return await self._submit(call, writes)
        except self._failures as error:
            raise StorageError(f"{self.path}: {self._advice(error)}") from error

    def _submit(self, call: Callable[[], T], writes: bool | None) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # The last loop has ended, perhaps in the middle of a call.
            self._loop, self._jobs, self._busy = loop, [], False
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.append(Job(call, future, writes))
        if not self._busy:
            self._next_group()
        return future

    def _next_group(self) -> None:
        jobs = self._jobs[: self._max_group]
        # Reads before the first write need not wait for the commit. Reads after it must: they may
        # not return what is not durable yet.
        reads = list(takewhile(lambda job: job.writes is False, jobs))
        group = reads or list(takewhile(lambda job: job.writes is not None, jobs)) or jobs[:1]
        self._jobs = self._jobs[len(group) :]
        self._busy = bool(group)
        if group:
            done = in_thread(partial(self._carry_out, group), name=f"moored {self.path.name}")
            done.add_done_callback(partial(self._settle, group))

    def _settle(self, group: list[Job], done: asyncio.Future[None]) -> None:
        """Pass the results to the callers that still wait for them."""
        defect = done.exception()
        for job in group:
            if job.future.done():
                continue
            if (error := job.error or defect) is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(error)
        self._next_group()

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<{type(self).__name__} {self.path}: {state}>"

    def _carry_out(self, jobs: list[Job]) -> None:
        """Make the calls of a group; called in the thread."""
        for job in jobs:
            job.run()

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
