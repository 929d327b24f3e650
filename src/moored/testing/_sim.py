"""The handle that a scenario gets: time, chance, hosts and the network of one schedule."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Literal

from moored.kernel import Tasks, awaited

from ._errors import SimulationError
from ._hosts import Host, Main
from ._loop import SimLoop
from ._network import Network
from ._paths import Range

__all__ = ["Sim"]

FaultName = Literal["refuse", "reset", "blackhole", "pause"]

# The peer going away in the middle of a request is weather, not a defect of a test's own server.
_WEATHER = (ConnectionError, TimeoutError, asyncio.IncompleteReadError)


class Sim:
    """One schedule of a scenario: what it can ask for, and what it can break."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        #: The simulated network, with its faults.
        self.network: Network = loop.network
        #: Chance for the scenario's own decisions; the code under test has `Clock.random`.
        self.rng: random.Random = loop._chance()
        self._tasks = Tasks()
        self._context = copy_context()

    @property
    def seed(self) -> int:
        """The seed of this schedule."""
        return self.loop.seed

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time()

    def random(self, low: float, high: float) -> float:
        """A number between the two, by the seed."""
        return self.rng.uniform(low, high)

    def at(self, when: float, action: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call a function, or start a coroutine function, at a virtual time.

        An error in it fails the seed.
        """
        if when < self.now:
            raise SimulationError(f"it is {self.now:g} s already: {when:g} s is in the past")
        # Not in the caller's context: what is planned survives the host that planned it.
        return self.loop.call_at(when, self._act, action, *args, context=self._context)

    def after(self, delay: float, action: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call a function, or start a coroutine function, so many virtual seconds from now."""
        return self.at(self.now + delay, action, *args)

    def storm(
        self,
        *hosts: str,
        until: float,
        faults: Sequence[FaultName] = ("refuse", "reset", "blackhole", "pause"),
        every: Range = (0.5, 5.0),
        lasting: Range = (0.1, 5.0),
    ) -> None:
        """Break the network of these hosts again and again, as the seed likes, then let it be calm.

        :param until: the virtual time from which nothing is broken any more.
        :param faults: what may happen; each is a method of the network.
        :param every: seconds from one fault to the next.
        :param lasting: seconds until a fault is healed.
        """
        begin = self.now + self.random(*every)
        while begin < until:
            host = self.rng.choice(hosts)
            self.at(begin, getattr(self.network, self.rng.choice(faults)), host)
            self.at(min(until, begin + self.random(*lasting)), self.network.heal, host)
            begin += self.random(*every)

    def _act(self, action: Callable[..., Any], *args: Any) -> None:
        result = action(*args)
        if inspect.iscoroutine(result):
            self._tasks.start(result, name=f"planned at {self.now:g} s")

    def host(self, name: str, main: Main | None = None) -> Host:
        """The host with this name, made when it is new; `main` runs on it, from each restart on."""
        host = self.network.host(name)
        if main is not None:
            host.boot(main)
        return host

    async def serve(
        self, server: Callable[..., Any], *, host: str = "server", port: int = 8000
    ) -> Host:
        """Run a server on a host of its own, and return the host when it listens.

        `server` is a protocol factory (no arguments), or a stream handler (reader and writer).
        A stream handler may let connection errors escape: they end its connection, no more.
        """
        start, handler = _starter(server)
        listening = self.loop.create_future()

        async def main() -> None:
            try:
                listener = await start(handler, host, port)
            except BaseException as error:
                if listening.done():
                    raise
                listening.set_exception(error)
                return
            if not listening.done():
                listening.set_result(None)
            async with listener:
                await self.loop.create_future()

        machine = self.host(host, main)
        await listening
        return machine

    def wall_step(self, seconds: float) -> None:
        """Step the wall clock of all hosts, forwards or back; monotonic time is not touched."""
        self.note(f"wall clock stepped by {seconds:+g} s")
        self.loop.wall_offset += seconds

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        self.loop.mark("scenario", text)

    def __repr__(self) -> str:
        return f"<Sim seed {self.seed} at {self.now:.6f} s, {self.network!r}>"


def _starter(server: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    needed = [
        parameter
        for parameter in inspect.signature(server).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) == 2:
        return asyncio.start_server, _weatherproof(server)
    if not needed:
        return asyncio.get_running_loop().create_server, server
    raise SimulationError(
        f"{server!r} is no server: pass a protocol factory (no arguments) "
        "or a stream handler (reader, writer)"
    )


def _weatherproof(handler: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await awaited(handler(reader, writer))
        except _WEATHER:
            writer.transport.abort()

    return handle
