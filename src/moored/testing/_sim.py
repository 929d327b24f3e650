"""The argument of a scenario: time, random numbers, hosts and the network of one schedule."""

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

# Errors of a stream handler whose peer disconnects: not a defect of the test's server.
_NETWORK_ERRORS = (ConnectionError, TimeoutError, asyncio.IncompleteReadError)


class Sim:
    """One schedule of a scenario: its time, its random numbers, its hosts and its faults."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        #: The simulated network, with its faults.
        self.network: Network = loop.network
        #: Random numbers for the scenario; the code under test uses `Clock.random`.
        self.rng: random.Random = loop._new_random()
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
        """Return a random number between the two."""
        return self.rng.uniform(low, high)

    def at(self, when: float, action: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call a function, or start a coroutine function, at a virtual time.

        If it raises, the seed fails.
        """
        if when < self.now:
            raise SimulationError(f"{when:g} s is in the past: virtual time is {self.now:g} s")
        # In the scenario's context: the call is made even if the calling host is killed before.
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
        """Inject random faults into the network of these hosts, until a virtual time.

        :param until: the virtual time at which all these faults are healed.
        :param faults: the faults to choose from; each is a method of the network.
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
        """Return the host with this name, created on first use; run `main` there at each start."""
        host = self.network.host(name)
        if main is not None:
            host.boot(main)
        return host

    async def serve(
        self, server: Callable[..., Any], *, host: str = "server", port: int = 8000
    ) -> Host:
        """Run a server on its own host, and return the host when the server listens.

        `server` is a protocol factory (no arguments), or a stream handler (reader and writer).
        A connection error in a stream handler only ends that connection.
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
        """Step the wall clock of all hosts, forwards or back; monotonic time does not change."""
        self.note(f"wall clock stepped by {seconds:+g} s")
        self.loop.wall_offset += seconds

    def note(self, text: str) -> None:
        """Add a line to the trace."""
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
        return asyncio.start_server, _network_tolerant(server)
    if not needed:
        return asyncio.get_running_loop().create_server, server
    raise SimulationError(
        f"{server!r} is not a server: pass a protocol factory (no arguments) "
        "or a stream handler (reader, writer)"
    )


def _network_tolerant(
    handler: Callable[..., Any],
) -> Callable[..., Coroutine[Any, Any, None]]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await awaited(handler(reader, writer))
        except _NETWORK_ERRORS:
            writer.transport.abort()

    return handle
