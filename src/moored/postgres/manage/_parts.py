"""The children of a manager: the owners of its connections, and jobs.

They run under a supervisor of their own, a new one for each run of the connection subsystem. The
manager decides how to react to a failure, so each failure is posted to it as an event. The
supervisor restarts an owner of connections immediately, but the owner then waits until the manager
gives it new work.
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

#: How long a child may take to end after it was cancelled, in seconds.
SHUTDOWN = 5.0

PostedEvent = Callable[[], Actions]
Work = Callable[[], Coroutine[Any, Any, None]]


class PartFailed(PostgresError, RestartRequested):
    """A child of the manager has failed."""


class Parts:
    """Starts and stops the children of one run, and posts their events.

    :param post: receives the events of children; events of a replaced child have no effect.
    """

    def __init__(self, supervisor: Supervisor, post: Callable[[PostedEvent], None]) -> None:
        self._supervisor = supervisor
        self._post = post
        self._generations: defaultdict[str, Generation] = defaultdict(Generation)
        #: The next work of each owner of connections.
        self._next: dict[str, asyncio.Queue[Work]] = {}

    def replace(self, name: str) -> Callable[[PostedEvent], None]:
        """Start the next generation of a child; return the function that posts its events."""
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
        """Run work that owns connections; the child of this name must have none."""
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
        """Run a job, in place of one of the same name; without `failed`, log its failure."""
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
                log.warning("the job %r of the manager failed: %s", name, describe(error))
                return
            first = _first(error)
            diagnosis = diagnose(first)
            post(lambda: failed(diagnosis))
            raise PartFailed(str(diagnosis)) from first

    def is_running(self, name: str) -> bool:
        """Return whether there is a child of this name."""
        return self._supervisor.value(name) is not None

    async def stop(self, name: str) -> None:
        """Stop a child, if there is one, and wait for its end."""
        self._next.pop(name, None)
        await self._supervisor.stop_child(name)

    async def stop_all(self) -> None:
        """Stop every child."""
        await asyncio.gather(*map(self.stop, self._generations))


def _first(error: Exception) -> BaseException:
    """Return the first error of a group of tasks."""
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
