"""The children of a manager: what owns its connections, and the jobs beside that.

They run below a supervisor of their own, one for each life of the connection subsystem. What to do
about a failure is the manager's decision, so a failure is an event for it. A child that owns
connections stays: after a failure it is restarted at once, and waits until the manager starts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from moored.kernel import Child, Context, Generation, RestartRequested, Supervisor, describe

from .._errors import PostgresError
from ..server import Diagnosis, diagnose
from ._manager_core import Actions

__all__ = ["Parts"]

log = logging.getLogger("moored.postgres")

#: How long a child may take to end after it was cancelled.
SHUTDOWN = 5.0

PostedEvent = Callable[[], Actions]
Work = Callable[[], Coroutine[Any, Any, None]]


class PartFailed(PostgresError, RestartRequested):
    """A child of the manager has failed."""


class Parts:
    """Starts and stops the children of one life, and posts their events.

    :param post: takes the events of children; those of a child that was replaced do nothing.
    """

    def __init__(self, supervisor: Supervisor, post: Callable[[PostedEvent], None]) -> None:
        self._supervisor = supervisor
        self._post = post
        self._generations: defaultdict[str, Generation] = defaultdict(Generation)
        #: What each owner of connections runs next.
        self._next: dict[str, asyncio.Queue[Work]] = {}

    def replace(self, name: str) -> Callable[[PostedEvent], None]:
        """Begin the next generation of a child; return the function that posts its events."""
        generation = self._generations[name]
        token = generation.next()
        return lambda event: self._post(lambda: event() if generation.is_current(token) else [])

    async def own(
        self,
        name: str,
        work: Work,
        failed: Callable[[Diagnosis], Actions],
        post: Callable[[PostedEvent], None],
    ) -> None:
        """Run work that owns connections; the child of this name must not be running any."""
        if name not in self._next:
            self._next[name] = asyncio.Queue()
            child = Child(name, partial(self._run_next, self._next[name]), shutdown=SHUTDOWN)
            await self._supervisor.start_child(child)
        self._next[name].put_nowait(partial(self._watched, name, work, failed, post))

    async def _run_next(self, works: asyncio.Queue[Work], ctx: Context) -> None:
        ctx.started(self)
        work = await works.get()
        await work()

    async def start(
        self, name: str, work: Work, failed: Callable[[Diagnosis], Actions] | None = None
    ) -> None:
        """Run a job, in place of the one of this name; without `failed`, its failure is logged."""
        await self.stop(name)
        post = self.replace(name)

        async def run(ctx: Context) -> None:
            ctx.started(self)
            await self._watched(name, work, failed, post)

        await self._supervisor.start_child(Child(name, run, restart="temporary", shutdown=SHUTDOWN))

    async def _watched(
        self,
        name: str,
        work: Work,
        failed: Callable[[Diagnosis], Actions] | None,
        post: Callable[[PostedEvent], None],
    ) -> None:
        try:
            await work()
        except Exception as error:
            if failed is None:
                log.warning("%s: %s", name, describe(error))
                return
            first = _first(error)
            diagnosis = diagnose(first)
            post(lambda: failed(diagnosis))
            raise PartFailed(str(diagnosis)) from first

    def is_running(self, name: str) -> bool:
        """Whether there is a child of this name."""
        return self._supervisor.value(name) is not None

    async def stop(self, name: str) -> None:
        """Stop a child and wait for its end; harmless if there is none."""
        self._next.pop(name, None)
        await self._supervisor.stop_child(name)

    async def stop_all(self) -> None:
        """Stop every child."""
        await asyncio.gather(*map(self.stop, self._generations))

    def __repr__(self) -> str:
        return f"<Parts of {self._supervisor!r}>"


def _first(error: Exception) -> BaseException:
    """The error that matters: a group of tasks wraps what one of them raised."""
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
