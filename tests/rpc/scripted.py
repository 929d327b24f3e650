"""Scripted servers and channels for simulations: they die, hang and move as a scenario says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.rpc import ConnectFailed, ConnectionConfig, Member, Topology

ADDRESSES = ("north:1", "south:1")


class World:
    """The servers, their tokens and the open channels."""

    def __init__(self, chance: random.Random, lanes: int = 1) -> None:
        self.chance = chance
        #: How many channels are made at once for one connection.
        self.lanes = lanes
        #: The token that the servers accept.
        self.token = 0
        self.up = dict.fromkeys(ADDRESSES, True)
        self.hangs = dict.fromkeys(ADDRESSES, False)
        #: Servers that are up, and answer UNAVAILABLE.
        self.busy = dict.fromkeys(ADDRESSES, False)
        self.open: set[Channel] = set()
        #: Violated invariants; collected, because an exception would count as a failed attempt.
        self.wrong: list[str] = []
        self.dialling: dict[str, int] = {}
        self.primary, self.version = ADDRESSES[0], 1

    def fall(self, address: str) -> None:
        """Kill a server and its connections."""
        self.up[address] = False
        for channel in self.open:
            if channel.address == address:
                channel.dead = True

    def topology(self) -> Topology:
        members = [Member(a, f"http://{a}", 3 if a == self.primary else 1) for a in ADDRESSES]
        return Topology(self.version, tuple(members))

    def channel(self, config: ConnectionConfig) -> Channel:
        return Channel(self, config)

    def credentials(self, config: ConnectionConfig) -> Credentials:
        return Credentials(self)


class Credentials:
    """Credentials of one connection; a refresh takes the token that the servers accept now."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.token = world.token
        self.refreshing = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", str(self.token)),)

    async def refresh(self) -> None:
        if self.refreshing:
            self.world.wrong.append("two refreshes at once")
        if self.token == self.world.token:
            self.world.wrong.append("refreshed without need")
        self.refreshing = True
        try:
            await asyncio.sleep(self.world.chance.uniform(0.001, 0.2))
            self.token = self.world.token
        finally:
            self.refreshing = False


class Channel:
    """A channel to a scripted server."""

    def __init__(self, world: World, config: ConnectionConfig) -> None:
        self.world = world
        self.address = config.address
        self.key = config.token
        #: Its server has died since it connected, or an application asked to replace it.
        self.dead = False
        self.closed = False
        self.calls = 0
        #: How many calls its live server has answered with UNAVAILABLE.
        self.unavailable = 0
        world.open.add(self)

    @property
    def hangs(self) -> bool:
        return self.world.hangs[self.address] and not self.dead

    def get_state(self) -> grpc.ChannelConnectivity:
        """Report the state as gRPC does: a lost connection is noticed late."""
        lost = self.dead and self.world.chance.random() < 0.7
        return grpc.ChannelConnectivity.IDLE if lost else grpc.ChannelConnectivity.READY

    async def channel_ready(self) -> None:
        world = self.world
        under_way = world.dialling.setdefault(self.key, 0)
        if under_way >= world.lanes:
            world.wrong.append("two attempts at once")
        world.dialling[self.key] += 1
        try:
            await asyncio.sleep(world.chance.uniform(0.001, 0.05))
            while world.hangs[self.address]:  # noqa: ASYNC110 - a scenario decides
                await asyncio.sleep(0.5)
            if not world.up[self.address]:
                raise ConnectFailed(f"{self.address} refuses")
        finally:
            world.dialling[self.key] -= 1

    def unary_unary(self, *given: Any, **more: Any) -> Callable[..., Call]:
        def call(
            request: Any, *, timeout: float | None = None, metadata: Any = (), **rest: Any
        ) -> Call:
            assert not self.closed, "a call over a closed channel"
            return Call(self, request, timeout, dict(metadata)["authorization"])

        return call

    async def close(self, grace: float | None = None) -> None:
        if self.calls:
            self.world.wrong.append("closed with calls in flight")
        self.closed = True
        self.world.open.discard(self)


class Call:
    """One call, with the interface of a `grpc.aio` call."""

    def __init__(self, channel: Channel, request: Any, timeout: float | None, token: str) -> None:
        self.channel = channel
        self._token = token
        channel.calls += 1
        self._code = grpc.StatusCode.OK
        self._request = request
        self._callbacks: list[Callable[[Any], None]] = []
        self._task = asyncio.get_running_loop().create_task(self._run(timeout))
        self._task.add_done_callback(self._ended)

    async def _run(self, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(self.channel.world.chance.uniform(0.001, 0.3))
                while self.channel.hangs:  # noqa: ASYNC110 - a scenario decides
                    await asyncio.sleep(0.1)
            if self.channel.dead or not self.channel.world.up[self.channel.address]:
                self.channel.dead = True
                self._code = grpc.StatusCode.UNAVAILABLE
            elif self.channel.world.busy[self.channel.address]:
                self.channel.unavailable += 1
                self._code = grpc.StatusCode.UNAVAILABLE
            elif self._token != str(self.channel.world.token):
                self._code = grpc.StatusCode.UNAUTHENTICATED
        except TimeoutError:
            self._code = grpc.StatusCode.DEADLINE_EXCEEDED
        except asyncio.CancelledError:
            self._code = grpc.StatusCode.CANCELLED

    def _ended(self, task: Any) -> None:
        self.channel.calls -= 1
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._code is grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        return self._task.cancel()

    def done(self) -> bool:
        return self._task.done()

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return ""

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def trailing_metadata(self) -> tuple[()]:
        return ()

    async def debug_error_string(self) -> str:
        return ""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._outcome().__await__()

    async def _outcome(self) -> Any:
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(self._code, (), (), self.channel.address)
        return self._request
