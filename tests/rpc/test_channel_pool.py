"""Pools of channels, against a server that limits the calls of each connection."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    RegularStrategy,
    StaticTopology,
)
from moored.rpc._channel_pool import AioChannelPool, ChannelPool, lanes_of
from moored.rpc._dial import make_aio_channel, make_channel
from moored.rpc._grpc_internals import has_connection
from moored.testing import FaultProxy

from .handlers import (
    CHAT,
    COLLECT,
    COUNT,
    ECHO,
    ENDLESS,
    FAIL,
    MEET,
    MOST,
    SLEEP,
    eventually,
    loss_noticed_async,
)
from .servers import EchoServer
from .sides import LIMIT, SIDES, Aio, Threads

#: How many calls the server allows over one connection.
STREAMS = 4
both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]


@pytest.fixture(scope="module")
def limited_server() -> Iterator[EchoServer]:
    with EchoServer(streams=STREAMS) as server:
        yield server


def config(server: EchoServer) -> ConnectionConfig:
    return ConnectionConfig.from_uri(server.uri)


async def meet(side: Threads | Aio, channel: Any, number: int) -> Counter[bytes]:
    """Make that many concurrent calls, and return how many used each connection."""
    await side.call(channel, MOST)  # reset the count of earlier calls
    request = str(number).encode()
    calls = [side.call(channel, MEET, request) for _ in range(number)]
    return Counter(await asyncio.gather(*calls))


# -- through the managers --------------------------------------------------------------------------


@both
async def test_one_channel_has_the_call_limit_of_the_server(
    kind: Kind, limited_server: EchoServer
) -> None:
    async with kind() as side:
        channel = await side.get(config(limited_server))
        calls = [side.call(channel, MEET, b"5", 2.0) for _ in range(STREAMS + 1)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert await side.call(channel, MOST) == b"4"


@both
async def test_four_channels_have_four_times_the_call_limit(
    kind: Kind, limited_server: EchoServer
) -> None:
    async with kind(channels=4) as side:
        channel = await side.get(config(limited_server))
        assert sorted((await meet(side, channel, 16)).values()) == [4, 4, 4, 4]
        assert await side.call(channel, MOST) == b"16"
        assert channel.calls == 0
        assert side.manager.get_stats()["connections"][0]["generation"] == 1


@both
async def test_error_of_one_channel_replaces_all(kind: Kind) -> None:
    with EchoServer(streams=STREAMS) as server:
        async with kind(channels=2) as side:
            channel = await side.get(config(server))
            old = channel.endpoint.live
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", 5.0)
            await loss_noticed_async(channel)
            server.start()
            assert sorted((await meet(side, channel, 8)).values()) == [4, 4]
            assert channel.generation == 2
            async with asyncio.timeout(LIMIT):
                while not old.closed or old in channel.endpoint.old:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for lane in lanes_of(old.channel):
                assert await _is_closed(side, lane)


@both
async def test_unavailable_answer_keeps_a_pool_of_which_one_channel_is_idle(
    kind: Kind, echo: EchoServer
) -> None:
    made: list[Any] = []
    make = make_channel if kind is Threads else make_aio_channel

    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        second = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")

        def factory(config: ConnectionConfig) -> Any:
            made.append(make(second if made else config, len(made) + 6000))
            return made[-1]

        async with kind(channels=2, handler_factory=factory) as side:
            channel = await side.get(config(echo), timeout=LIMIT)
            proxy.reset()  # as a server does that closes idle connections
            await asyncio.to_thread(eventually, lambda: not has_connection(made[1]), LIMIT)
            with pytest.raises(grpc.RpcError):
                await side.call(channel, FAIL, b"UNAVAILABLE")
            counters = side.manager._table.counters[echo.address]
            await asyncio.to_thread(
                eventually, lambda: counters.unavailable_answers + counters.recoveries > 0, LIMIT
            )
            assert (counters.unavailable_answers, channel.generation) == (1, 1)


async def _is_closed(side: Threads | Aio, channel: Any) -> bool:
    """Whether the channel is closed, or becomes so soon."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await side.call(channel, ECHO, b"", 1.0)
            except (ValueError, grpc.aio.UsageError):
                return True
            except grpc.RpcError:
                pass
            await asyncio.sleep(0.05)


@both
async def test_pool_is_used_only_if_all_channels_are_connected(
    kind: Kind, echo: EchoServer
) -> None:
    made: list[Any] = []
    make = make_channel if kind is Threads else make_aio_channel
    dead = ConnectionConfig.from_uri(EchoServer().uri)

    def factory(config: ConnectionConfig) -> Any:
        made.append(make(config if len(made) % 2 == 0 else dead, len(made) + 1000))
        return made[-1]

    async with kind(channels=2, handler_factory=factory) as side:
        with pytest.raises(ConnectFailed):
            await side.get(config(echo), timeout=1.0)
    assert len(made) >= 2
    for channel in made:
        assert await _is_closed(side, channel)


@both
async def test_failing_channel_factory_leaves_no_channel_open(kind: Kind, echo: EchoServer) -> None:
    made: list[Any] = []
    make = make_channel if kind is Threads else make_aio_channel

    def factory(config: ConnectionConfig) -> Any:
        if len(made) % 3 == 2:
            made.append(None)
            raise OSError("too many")
        made.append(make(config, len(made) + 2000))
        return made[-1]

    async with kind(channels=3, handler_factory=factory) as side:
        with pytest.raises(ConnectFailed, match="too many"):
            await side.get(config(echo), timeout=1.0)
    for channel in made:
        assert channel is None or await _is_closed(side, channel)


@both
async def test_all_channels_of_a_pool_lead_to_the_same_primary(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(channels=3, fetch_topology=StaticTopology([echo.uri])) as side:
        channel = await side.get(ConnectionConfig.from_uri("http://cluster.test"))
        assert channel.address == echo.address
        assert len(lanes_of(channel.endpoint.live.channel)) == 3
        assert len(await meet(side, channel, 3)) == 3


@both
async def test_idle_pool_is_healthy_if_all_channels_are(kind: Kind, echo: EchoServer) -> None:
    asked: list[Any] = []

    def probe(channel: Any) -> bool:
        asked.append(channel)
        return True

    async with kind(channels=3, idle=0.1, probe=probe) as side:
        channel = await side.get(config(echo))
        await asyncio.sleep(0.2)
        assert await side.get(config(echo)) is channel
        assert set(asked) == set(lanes_of(channel.endpoint.live.channel))
        assert channel.generation == 1


@both
async def test_single_channel_is_not_wrapped_in_a_pool(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        channel = await side.get(config(echo))
        assert not isinstance(channel.endpoint.live.channel, (ChannelPool, AioChannelPool))


def test_invalid_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="channels=0 must be at least 1"):
        ConnectionManager(channels=0)
    with pytest.raises(ValueError, match="channels=2 must be given to the strategy"):
        ConnectionManager(channels=2, strategy=lambda config: RegularStrategy())


# -- the pools alone -------------------------------------------------------------------------------


@pytest.fixture
def pool(echo: EchoServer) -> Iterator[ChannelPool]:
    with ChannelPool([make_channel(config(echo), number) for number in (1, 2)]) as pool:
        yield pool


@pytest.fixture
async def aio_pool(echo: EchoServer) -> AsyncIterator[AioChannelPool]:
    channels = [make_aio_channel(config(echo), number) for number in (1, 2)]
    async with AioChannelPool(channels) as pool:
        yield pool


def under_way(pool: ChannelPool | AioChannelPool) -> list[int]:
    return [len(lane.calls) for lane in pool.lanes]


def test_calls_of_each_kind_are_counted_until_they_end(pool: ChannelPool) -> None:
    first = pool.unary_stream(ENDLESS)(b"0.01", timeout=LIMIT)
    assert next(first) == b"0"
    assert under_way(pool) == [1, 0]
    second = pool.stream_stream(CHAT)(iter([b"a"]), timeout=LIMIT)
    later = pool.unary_unary(SLEEP).future(b"0.2", timeout=LIMIT)
    assert under_way(pool) == [2, 1], "calls must use the channel with the fewest calls"
    assert list(second) == [b"re: a"]
    assert later.result() == b"0.2"
    first.cancel()
    assert pool.unary_unary(ECHO)(b"x", timeout=LIMIT) == b"x"
    assert pool.unary_unary(ECHO).with_call(b"x", timeout=LIMIT)[0] == b"x"
    assert pool.stream_unary(COLLECT)(iter([b"a", b"b"]), timeout=LIMIT) == b"ab"
    assert pool.stream_unary(COLLECT).with_call(iter([b"a"]), timeout=LIMIT)[0] == b"a"
    assert pool.stream_unary(COLLECT).future(iter([b"a"]), timeout=LIMIT).result() == b"a"
    with pytest.raises(grpc.RpcError):
        pool.unary_unary(FAIL)(b"ABORTED", timeout=LIMIT)
    eventually(lambda: under_way(pool) == [0, 0])


def test_call_that_cannot_begin_is_not_counted(pool: ChannelPool) -> None:
    with pytest.raises(TypeError):
        pool.unary_unary(ECHO).future(b"x", nonsense=True)
    with pytest.raises(TypeError):
        pool.unary_stream(COUNT)(b"x", nonsense=True)
    assert under_way(pool) == [0, 0]


def test_garbage_collected_call_is_not_counted(pool: ChannelPool) -> None:
    call = pool.unary_stream(ENDLESS)(b"0.01", timeout=LIMIT)
    next(call)
    del call
    gc.collect()
    eventually(lambda: under_way(pool) == [0, 0])


def test_pool_is_ready_when_all_channels_are(pool: ChannelPool) -> None:
    states: list[grpc.ChannelConnectivity] = []
    ready = threading.Event()

    def record(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        if state is grpc.ChannelConnectivity.READY:
            ready.set()

    pool.subscribe(record, True)
    assert ready.wait(LIMIT)
    assert states.count(grpc.ChannelConnectivity.READY) == 1
    pool.unsubscribe(record)
    pool.unsubscribe(record)


async def test_calls_of_asyncio_are_counted_until_they_end(aio_pool: AioChannelPool) -> None:
    first = aio_pool.unary_stream(ENDLESS)(b"0.01", timeout=LIMIT)
    assert await first.read() == b"0"
    second = aio_pool.stream_stream(CHAT)(timeout=LIMIT)
    assert under_way(aio_pool) == [1, 1]
    await second.write(b"a")
    assert await second.read() == b"re: a"
    await second.done_writing()
    assert await second.read() is grpc.aio.EOF
    assert await aio_pool.stream_unary(COLLECT)([b"a", b"b"], timeout=LIMIT) == b"ab"
    assert await aio_pool.unary_unary(ECHO)(b"x", timeout=LIMIT) == b"x"
    first.cancel()
    async with asyncio.timeout(LIMIT):
        while under_way(aio_pool) != [0, 0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_asyncio_pool_reports_its_state(aio_pool: AioChannelPool) -> None:
    state = grpc.ChannelConnectivity
    assert aio_pool.get_state() is state.IDLE
    change = asyncio.create_task(aio_pool.wait_for_state_change(state.IDLE))
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT):
        await aio_pool.channel_ready()
        await change
    assert aio_pool.get_state() is state.READY
