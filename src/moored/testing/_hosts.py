"""Simulated machines whose processes can be killed, paused and restarted.

A host runs one process at a time. Everything that a process starts (tasks, timers, connections)
belongs to it, because it inherits a context variable. A killed process never runs again: no step of
a task, no `finally` block, no timer, no write. This is `kill -9`, unlike `task.cancel()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from moored.kernel import Clock

from ._errors import HostKilled, SimulationError

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._server import SimServer
    from ._transport import SimTransport

__all__ = ["CURRENT", "Host", "Main", "Process"]

T = TypeVar("T")

#: A coroutine function that a host runs at each start.
Main = Callable[[], Coroutine[Any, Any, object]]

#: The process that the running code belongs to.
CURRENT: ContextVar[Process] = ContextVar("moored_process")


class Process:
    """The process of a host, from its start to its kill."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.alive = True
        self.paused = False
        self.transports: dict[SimTransport, None] = {}
        self.servers: dict[SimServer, None] = {}
        self.killed: asyncio.Future[None] = host.loop.create_future()
        self._parked: list[asyncio.Handle] = []

    def context(self) -> Context:
        """Return a context whose tasks, timers and connections belong to this process."""
        context = copy_context()
        context.run(CURRENT.set, self)
        return context

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of this process may run now; keep it for later while paused."""
        if self.alive and self.paused:
            self._parked.append(handle)
        return self.alive and not self.paused

    def pause(self) -> None:
        """Stop running, as after SIGSTOP; the host's network stack still receives."""
        if self.alive and not self.paused:
            self.paused = True
            self.host.loop.restricted += 1

    def resume(self) -> None:
        """Continue with the callbacks and bytes that arrived meanwhile, in order."""
        if self.alive and self.paused:
            self.paused = False
            self.host.loop.restricted -= 1
            # At the front: the callbacks in the queue were scheduled later.
            self.host.loop._ready.extendleft(reversed(self._parked))
            self._parked.clear()
            for transport in list(self.transports):
                transport.wake()

    def kill(self) -> None:
        """End the process at once, without running any clean-up code."""
        if not self.alive:
            return
        loop = self.host.loop
        self.resume()
        self.alive = False
        loop.restricted += 1
        loop.kept.update((task, None) for task in loop.tasks() if task.process is self)
        for server in list(self.servers):
            server.killed()
        for transport in list(self.transports):
            transport.killed()
        self.killed.set_result(None)


class Host:
    """A simulated machine with a name, reachable on the simulated network under that name."""

    def __init__(self, loop: SimLoop, name: str, ip: str) -> None:
        self.loop = loop
        self.name = name
        self.ip = ip
        #: The coroutine functions that run at each start.
        self.mains: list[Main] = []
        #: Seconds by which the wall clock of this host is wrong.
        self.wall_offset = 0.0
        self.clock = Clock(loop.time, self._wall, loop._clock.random)
        self.process = Process(self)

    def _wall(self) -> float:
        return self.loop._clock.wall() + self.wall_offset

    @property
    def alive(self) -> bool:
        """Whether the host runs: False from a kill to the next restart."""
        return self.process.alive

    @property
    def paused(self) -> bool:
        """Whether the host is paused."""
        return self.process.alive and self.process.paused

    def start(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this host; after a kill the task never ends."""
        if not self.alive:
            coro.close()
            raise HostKilled(f"host {self.name!r} is not running: restart() it first")
        task: asyncio.Task[T] = self.loop.create_task(
            coro, name=name or f"{self.name}/{self.loop.number()}", context=self.process.context()
        )
        self.loop.kept[task] = None
        task.add_done_callback(self.loop.kept.pop)
        return task

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this host and wait for it; raise `HostKilled` if the host dies."""
        task, killed = self.start(coro), self.process.killed
        try:
            await asyncio.wait((task, killed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            raise HostKilled(f"host {self.name!r} was killed")
        return task.result()

    def kill(self) -> None:
        """End everything on this host at once: no `finally` block runs, connections break.

        The seed decides what each peer sees: a reset, or the end of the stream. (The coroutines
        are closed when the whole schedule has ended, which no other code can observe.)
        """
        self._refuse_main("kill")
        self.loop.mark(self.name, "killed", 1)
        self.process.kill()

    def _refuse_main(self, what: str) -> None:
        if self.name == "main":
            raise SimulationError(f"the scenario itself runs on host 'main': {what} another host")

    def restart(self) -> None:
        """Kill the process, and start the mains of the host in a new one."""
        if not self.mains:
            raise SimulationError(f"host {self.name!r} has no main: pass one to sim.host()")
        self.kill()
        self.boot()

    def boot(self, *mains: Main) -> None:
        """Start these mains now, in a new process if the host was killed, and at each restart."""
        if self.alive:
            starting = mains
        else:
            starting = (*self.mains, *mains)
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

    def pause(self) -> None:
        """Stop the host: no code runs on it, and bytes sent to it wait."""
        self._refuse_main("pause")
        self.loop.mark(self.name, "paused", 3)
        self.process.pause()

    def resume(self) -> None:
        """Continue a paused host."""
        self.loop.mark(self.name, "resumed", 4)
        self.process.resume()

    def wall_step(self, seconds: float) -> None:
        """Step this host's wall clock, forwards or back; monotonic time does not change."""
        self.loop.mark(self.name, f"wall clock stepped by {seconds:+g} s", 5)
        self.wall_offset += seconds

    def __repr__(self) -> str:
        state = "killed" if not self.alive else "paused" if self.paused else "running"
        return f"<Host {self.name} ({self.ip}) {state}, {len(self.process.transports)} connections>"
