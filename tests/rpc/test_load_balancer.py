"""Behind a TCP load balancer: a backend that only answers UNAVAILABLE is left for a healthy one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import AsyncRegularStrategy, ConnectionConfig, RegularStrategy
from moored.rpc._endpoint import PAUSES
from moored.rpc._manager import ChangeQueue
from moored.testing import FaultProxy

from .handlers import ECHO, FAIL, PID
from .servers import EchoServer
from .sides import LIMIT, Aio, Kind, Threads, both
from .test_leaks import Leaping
from .test_live_servers import Reader, until

pytestmark = pytest.mark.every_loop

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Balancer:
    """Forwards each connection to the backend that is chosen when it begins."""

    def __init__(self, backend: EchoServer) -> None:
        self.backend = backend
        self.port = 0
        self._ends: set[asyncio.StreamWriter] = set()

    @property
    def config(self) -> ConnectionConfig:
        return ConnectionConfig.from_uri(f"http://127.0.0.1:{self.port}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for each in self._ends:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.backend.port)
        self._ends |= {writer, back}
        with suppress(ConnectionError):
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        for each in (writer, back):
            self._ends.discard(each)
            each.transport.abort()
            with suppress(ConnectionError):
                await each.wait_closed()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    target.close()


@asynccontextmanager
async def two_backends() -> AsyncIterator[tuple[Balancer, EchoServer, EchoServer]]:
    with EchoServer() as sick, EchoServer() as well:
        async with Balancer(sick).running() as balancer:
            yield balancer, sick, well


async def pid(side: Threads | Aio, channel: Any) -> int:
    return int(await side.call(channel, PID))


async def refused(side: Threads | Aio, channel: Any) -> None:
    """Get an UNAVAILABLE answer over the live connection."""
    with pytest.raises(grpc.RpcError) as raised:
        await side.call(channel, FAIL, b"UNAVAILABLE")
    assert raised.value.code() is UNAVAILABLE


@both
async def test_channel_leaves_a_backend_that_only_answers_unavailable(kind: Kind) -> None:
    async with two_backends() as (balancer, sick, well), kind() as side:
        channel = await side.get(balancer.config, timeout=LIMIT)
        assert await pid(side, channel) == sick.pid
        stream = Reader(side, channel)
        assert await stream.read() == b"0"
        balancer.backend = well
        errors = 0
        while channel.generation == 1:  # no call of this loop succeeds before that
            await refused(side, channel)
            errors += 1
            await asyncio.sleep(0.05)  # the pace of the calls; a connect takes some milliseconds
        assert errors <= 3 * 10  # thrice the contract: the connect takes longer on a busy machine
        assert await pid(side, channel) == well.pid
        for number in range(1, 30):
            assert await stream.read() == str(number).encode(), "a stream was cut"
        counters = side.manager.get_stats()["counters"]
        assert (counters["renewals"], counters["recoveries"]) == (1, 0)
        assert counters["calls_waited"] == 0, "calls waited although there was a connection"
        stream.cancel()
        await until(lambda: not channel.endpoint.old)


@both
async def test_backend_that_also_answers_well_is_kept(kind: Kind, echo: EchoServer) -> None:
    async with Balancer(echo).running() as balancer, kind() as side:
        channel = await side.get(balancer.config, timeout=LIMIT)
        for _ in range(5):
            for _ in range(4):
                await refused(side, channel)
            assert await side.call(channel, ECHO, b"a") == b"a"
        assert channel.generation == 1


@both
async def test_overloaded_server_gets_no_storm_of_connections(kind: Kind, echo: EchoServer) -> None:
    clock = Leaping()
    async with kind(clock=clock) as side:
        channel = await side.get(ConnectionConfig.from_uri(echo.uri), timeout=LIMIT)
        while channel.generation < 2:
            await refused(side, channel)
        for _ in range(50):
            await refused(side, channel)
        assert channel.generation == 2
        clock.leap()
        while channel.generation < 3:
            await refused(side, channel)
        assert side.manager.get_stats()["counters"]["renewals"] == 2


@both
async def test_one_error_is_enough_if_classify_says_so(kind: Kind) -> None:
    def classify(error: BaseException) -> str | bool:
        return isinstance(error, grpc.RpcError) and error.code() is UNAVAILABLE and "renew"

    async with two_backends() as (balancer, sick, well), kind(classify=classify) as side:
        channel = await side.get(balancer.config, timeout=LIMIT)
        balancer.backend = well
        await refused(side, channel)
        await until(lambda: bool(channel.generation == 2))
        assert await pid(side, channel) == well.pid
        assert sick.pid != well.pid


@both
async def test_one_error_is_enough_if_the_strategy_says_so(kind: Kind) -> None:
    base: Any = RegularStrategy if kind is Threads else AsyncRegularStrategy

    class Leaving(base):  # type: ignore[misc]
        def renews(self, error: BaseException) -> bool:
            return "as asked" in str(error)

    async with two_backends() as (balancer, _, well), kind(strategy=lambda _: Leaving()) as side:
        channel = await side.get(balancer.config, timeout=LIMIT)
        balancer.backend = well
        await refused(side, channel)
        await until(lambda: bool(channel.generation == 2))
        assert await pid(side, channel) == well.pid


@both
async def test_program_renews_a_channel_and_waits_for_it(kind: Kind) -> None:
    clock = Leaping()
    async with two_backends() as (balancer, _, well), kind(clock=clock) as side:
        channel = await side.get(balancer.config, timeout=LIMIT)
        stream = Reader(side, channel)
        assert await stream.read() == b"0"
        balancer.backend = well

        async def renew() -> bool:
            if isinstance(side, Aio):
                return side.manager.renew(channel)
            return bool(await side.run(side.manager.renew, channel))

        assert await renew()
        assert await renew(), "it is being made"
        error = grpc.aio.AioRpcError(UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        assert await side.handle_error(channel, error), "it waits for the new connection"
        assert channel.generation == 2, "one renewal at a time"
        assert await pid(side, channel) == well.pid
        assert not await renew(), f"the last one was less than {PAUSES.proven:g} s ago"
        clock.leap()
        assert await renew()
        assert await stream.read() == b"1"
        stream.cancel()


@both
async def test_failed_renewal_keeps_the_connection(kind: Kind, echo: EchoServer) -> None:
    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        config = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
        async with kind() as side:
            channel = await side.get(config, timeout=LIMIT)
            proxy.refuse()
            for _ in range(5):
                await refused(side, channel)
            await until(lambda: side.manager.get_stats()["counters"]["connect_failures"] > 0)
            assert await side.call(channel, ECHO, b"a") == b"a"
            assert channel.generation == 1


@both
async def test_strategy_that_raises_stops_no_recovery(kind: Kind) -> None:
    base: Any = RegularStrategy if kind is Threads else AsyncRegularStrategy

    class Defective(base):  # type: ignore[misc]
        def renews(self, error: BaseException) -> bool:
            raise ValueError("a defect")

    with EchoServer() as server:
        async with kind(strategy=lambda _: Defective()) as side:
            channel = await side.get(ConnectionConfig.from_uri(server.uri), timeout=LIMIT)
            await refused(side, channel)  # with the call's own error
            server.kill()
            server.start()
            while channel.generation < 2:
                with suppress(grpc.RpcError):
                    await side.call(channel, ECHO, b"a")


def test_change_that_raises_stops_no_other() -> None:
    """Also a CancelledError of a user's callback, which is no cancellation of the loop's task."""
    queue, made = ChangeQueue(), threading.Event()

    def defect() -> None:
        raise asyncio.CancelledError

    queue.post(defect)
    queue.post(made.set)
    assert made.wait(LIMIT)
