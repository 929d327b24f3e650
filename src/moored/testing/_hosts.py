"""Simulated machines: what runs on them can be killed, paused and started again.

A host lives in processes, one at a time. Everything that a process starts (tasks, timers,
connections) belongs to it, because it inherits a context variable. A killed process never runs
again: not a step of a task, not a `finally`, not a timer; nothing that it would write afterwards
leaves it. That is `kill -9`, which `task.cancel()` is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from ..kernel._clock import Clock
from ._errors import HostKilled, SimulationError
from ._tasks import SimTask

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._server import SimServer
    from ._transport import SimTransport

__all__ = ["CURRENT", "Host", "Main", "Process"]

T = TypeVar("T")

#: What a host runs, from each start to the next kill.
Main = Callable[[], Coroutine[Any, Any, object]]

#: The process that the running code belongs to.
CURRENT: ContextVar[Process] = ContextVar("moored_process")


class Process:
    """One life of a host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.alive = True
        self.paused = False
        self.transports: dict[SimTransport, None] = {}
        self.servers: dict[SimServer, None] = {}
        self.awaited: dict[asyncio.Future[Any], None] = {}
        self.started: dict[asyncio.Task[Any], None] = {}
        self.frozen: list[SimTask] = []
        self._parked: list[asyncio.Handle] = []

    def context(self) -> Context:
        """A context in which everything that starts belongs to this process."""
        context = copy_context()
        context.run(CURRENT.set, self)
        return context

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of this process may run now; while it is paused, it waits here."""
        if self.alive and self.paused:
            self._parked.append(handle)
        return self.alive and not self.paused

    def pause(self) -> None:
        """Stop running, as after SIGSTOP: the machine's network stack goes on without it."""
        if self.alive and not self.paused:
            self.paused = True
            self.host.loop.troubled += 1

    def resume(self) -> None:
        """Continue, with what arrived meanwhile, in order."""
        if self.alive and self.paused:
            self.paused = False
            self.host.loop.troubled -= 1
            # In front: what is in the queue by now was scheduled later.
            self.host.loop._ready.extendleft(reversed(self._parked))
            self._parked.clear()
            for transport in list(self.transports):
                transport.wake()

    def kill(self) -> None:
        """End the process at once, without any clean-up."""
        if not self.alive:
            return
        loop = self.host.loop
        self.resume()
        self.alive = False
        loop.troubled += 1
        self.frozen = [task for task in loop.tasks() if task.process is self]
        for server in list(self.servers):
            server.killed()
        for transport in list(self.transports):
            transport.killed()
        for future in list(self.awaited):
            if not future.done():
                future.set_exception(HostKilled(f"host {self.host.name!r} was killed"))


class Host:
    """A simulated machine with a name, reachable on the simulated network under that name."""

    def __init__(self, loop: SimLoop, name: str, ip: str) -> None:
        self.loop = loop
        self.name = name
        self.ip = ip
        #: What runs here, from each start to the next kill.
        self.mains: list[Main] = []
        #: Seconds by which the wall clock of this host is wrong.
        self.wall_offset = 0.0
        self.clock = Clock(loop.time, self._wall, loop._clock.random)
        self.process = Process(self)
        # Held to the end, because a pending task that is collected is reported as a defect.
        self._graves: list[Process] = []

    def _wall(self) -> float:
        return self.loop._clock.wall() + self.wall_offset

    @property
    def alive(self) -> bool:
        """Whether something can run here: true until it is killed, and again after a restart."""
        return self.process.alive

    @property
    def paused(self) -> bool:
        """Whether the host is stopped for a while."""
        return self.process.alive and self.process.paused

    def start(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this host; after a kill the task never ends."""
        if not self.alive:
            coro.close()
            raise HostKilled(f"host {self.name!r} is not running: restart() it first")
        task: asyncio.Task[T] = self.loop.create_task(
            coro, name=name or f"{self.name}/{self.loop.number()}", context=self.process.context()
        )
        self.process.started[task] = None
        task.add_done_callback(self.process.started.pop)
        return task

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this host and wait for it; raises `HostKilled` if the host dies."""
        process = self.process
        task = self.start(coro)
        outcome: asyncio.Future[T] = self.loop.create_future()
        process.awaited[outcome] = None
        task.add_done_callback(lambda done: _hand_over(done, outcome))
        try:
            return await outcome
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            process.awaited.pop(outcome, None)

    def kill(self) -> None:
        """End everything on this host at once: no `finally` runs, connections break.

        What its peers see is up to the seed: a reset, or the end of the stream. (When the whole
        schedule is over, its coroutines are closed like all others; nothing is left to see it.)
        """
        self._refuse_main("kill")
        self.loop.mark(self.name, "killed", 1)
        self.process.kill()

    def _refuse_main(self, what: str) -> None:
        if self.name == "main":
            raise SimulationError(f"the scenario itself runs on host 'main': {what} another host")

    def restart(self) -> None:
        """Kill what still runs, and start what the host was given to run, as a new process."""
        if not self.mains:
            raise SimulationError(f"host {self.name!r} has nothing to start: give it a main")
        self.kill()
        self.boot()

    def boot(self, *mains: Main) -> None:
        """Run these on the host, in a new life if it was killed; and again at each restart."""
        if self.alive:
            starting = mains
        else:
            starting = (*self.mains, *mains)
            self._graves.append(self.process)
            self.process = Process(self)
        self.mains.extend(mains)
        self.loop.mark(self.name, "starts", 2)
        for main in starting:
            task = self.start(main(), name=f"{self.name}/main")
            task.add_done_callback(self._main_ended)

    def _main_ended(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.call_exception_handler(
                {"message": f"the main of host {self.name!r} failed", "exception": error}
            )

    def forget_graves(self) -> None:
        """Release the tasks of killed processes."""
        for process in (*self._graves, self.process):
            process.frozen.clear()
            process.started.clear()
        self._graves.clear()

    def pause(self) -> None:
        """Stop the host's processor: nothing runs on it, what is sent to it waits."""
        self._refuse_main("pause")
        self.loop.mark(self.name, "paused", 3)
        self.process.pause()

    def resume(self) -> None:
        """Let a paused host go on."""
        self.loop.mark(self.name, "resumed", 4)
        self.process.resume()

    def wall_step(self, seconds: float) -> None:
        """Step this host's wall clock, forwards or back; monotonic time is not touched."""
        self.loop.mark(self.name, f"wall clock stepped by {seconds:+g} s", 5)
        self.wall_offset += seconds

    def __repr__(self) -> str:
        state = "killed" if not self.alive else "paused" if self.paused else "running"
        return f"<Host {self.name} ({self.ip}) {state}, {len(self.process.transports)} connections>"


def _hand_over(task: asyncio.Task[T], outcome: asyncio.Future[T]) -> None:
    if task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is None:
        if not outcome.done():
            outcome.set_result(task.result())
    elif not outcome.done():
        outcome.set_exception(error)
    else:
        message = "a task on a host failed after its waiter was cancelled"
        task.get_loop().call_exception_handler(
            {"message": message, "exception": error, "task": task}
        )
