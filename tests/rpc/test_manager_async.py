"""The manager for asyncio, against real servers that are killed and restarted."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    ConnectFailed,
    ConnectionConfig,
    ManagerClosed,
    Member,
    Topology,
)
from moored.testing import FaultProxy

from .handlers import ECHO, FAIL, PID, loss_noticed_async
from .servers import EchoServer

pytestmark = pytest.mark.every_loop

LIMIT = 30.0


class Client:
    """A client object, for `client=`."""


@pytest.fixture
async def manager() -> AsyncIterator[AsyncConnectionManager]:
    async with AsyncConnectionManager(linger=1.0) as made:
        yield made


def config(server: EchoServer, **options: object) -> ConnectionConfig:
    return ConnectionConfig.from_uri(server.uri, **options)  # type: ignore[arg-type]


async def call(channel: grpc.aio.Channel, timeout: float = LIMIT) -> bytes:
    answer: bytes = await channel.unary_unary(ECHO)(b"hello", timeout=timeout)
    return answer


def line(manager: AsyncConnectionManager) -> dict[str, object]:
    (only,) = manager.get_stats()["connections"]
    return dict(only)


async def gone(manager: AsyncConnectionManager) -> None:
    async with asyncio.timeout(LIMIT):
        while manager.get_stats()["total_connections"]:  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.02)


# -- sharing ---------------------------------------------------------------------------------------


async def test_get_instance_returns_one_manager_per_loop(echo: EchoServer) -> None:
    mine = AsyncConnectionManager.get_instance()
    assert AsyncConnectionManager.get_instance() is mine
    await mine.close()
    assert AsyncConnectionManager.get_instance() is not mine


def test_ten_loops_in_a_row_leave_no_manager_behind(echo: EchoServer) -> None:
    left: list[weakref.ref[AsyncConnectionManager]] = []

    async def use() -> None:
        manager = AsyncConnectionManager.get_instance()
        left.append(weakref.ref(manager))
        assert await call(await manager.get_or_create(config(echo))) == b"hello"
        await manager.close_all()

    for _ in range(10):
        asyncio.run(use())
    gc.collect()
    assert [ref() for ref in left] == [None] * 10


async def test_concurrent_tasks_open_one_channel(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    found = await asyncio.gather(*(manager.get_or_create(config(echo)) for _ in range(20)))
    assert len(set(map(id, found))) == 1
    assert line(manager)["generation"] == 1
    assert await manager.get_or_create(config(echo, token="else")) is not found[0]


async def test_cancelled_caller_leaves_the_others_waiting(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    first = asyncio.create_task(manager.get_or_create(config(echo)))
    second = asyncio.create_task(manager.get_or_create(config(echo)))
    await asyncio.sleep(0)
    first.cancel()
    assert await call(await asyncio.wait_for(second, LIMIT)) == b"hello"


async def test_dedicated_channel_is_not_shared(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    shared = await manager.get_or_create(config(echo))
    own = await manager.get_or_create(config(echo), dedicated=True)
    assert own is not shared
    await manager.release(own)
    assert manager.get_stats()["dedicated_connections"] == 0
    with pytest.raises(ManagerClosed):
        await call(own)
    assert await call(shared) == b"hello"


async def test_connection_is_closed_after_its_last_client(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    first, second = Client(), Client()
    channel = await manager.get_or_create(config(echo), client=first)
    await manager.get_or_create(config(echo), client=second)
    await manager.release(channel, client=first)
    await channel.close()  # a surplus close of a shared channel
    assert await call(channel) == b"hello"
    del second
    gc.collect()
    await gone(manager)


async def test_call_that_cannot_start_is_not_counted_forever(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    channel = await manager.get_or_create(config(echo))
    kept = []
    for metadata in ((("x", "line\nend"),), (("Upper", "case"),)):
        for _ in range(2):
            begun = channel.unary_unary(ECHO)(b"", metadata=metadata, timeout=LIMIT)
            kept.append(begun)
            with pytest.raises(Exception, match="execute_batch"):
                await begun
    async with asyncio.timeout(LIMIT):
        while channel.calls:  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.001)
    assert await call(channel) == b"hello"
    assert all(begun.done() for begun in kept)


# -- recovery --------------------------------------------------------------------------------------


async def test_calls_during_an_outage_wait_for_the_server(manager: AsyncConnectionManager) -> None:
    with EchoServer() as server:
        channel = await manager.get_or_create(config(server))
        pid = await channel.unary_unary(PID)(b"")
        server.kill()
        with pytest.raises(grpc.RpcError):
            await call(channel, 5.0)
        await loss_noticed_async(channel)
        calls = [asyncio.create_task(call(channel)) for _ in range(20)]
        _, pending = await asyncio.wait(calls, timeout=1.0)
        assert len(pending) == 20
        await asyncio.to_thread(server.start)
        assert await asyncio.gather(*calls) == [b"hello"] * 20
        assert line(manager)["generation"] == 2, "more than one connection was made"
        assert await channel.unary_unary(PID)(b"", timeout=LIMIT) != pid


async def test_error_of_an_old_generation_changes_nothing(manager: AsyncConnectionManager) -> None:
    with EchoServer() as server:
        channel = await manager.get_or_create(config(server))
        server.kill()
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, 5.0)
        await loss_noticed_async(channel)
        await asyncio.to_thread(server.start)
        for _ in range(4):
            assert await manager.handle_error(channel, caught.value, timeout=LIMIT)
        assert await call(channel) == b"hello"
        assert line(manager)["generation"] == 2


async def test_error_that_no_reconnect_can_fix_is_not_handled(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    channel = await manager.get_or_create(config(echo))
    with pytest.raises(grpc.RpcError) as caught:
        await channel.unary_unary(FAIL)(b"INVALID_ARGUMENT", timeout=LIMIT)
    assert not await manager.handle_error(channel, caught.value)
    assert line(manager)["generation"] == 1


async def test_refused_connection_fails_with_the_address(manager: AsyncConnectionManager) -> None:
    server = EchoServer()
    began = time.monotonic()
    with pytest.raises(ConnectFailed, match=server.address):
        await manager.get_or_create(config(server), timeout=1.0)
    assert time.monotonic() - began < 5.0
    await gone(manager)


async def test_hung_endpoint_does_not_block_other_endpoints(
    manager: AsyncConnectionManager, echo: EchoServer
) -> None:
    channel = await manager.get_or_create(config(echo))
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        proxy.black_hole()
        dark = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
        waiting = asyncio.create_task(manager.get_or_create(dark, timeout=LIMIT))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        for _ in range(1000):
            assert await manager.get_or_create(config(echo)) is channel
        assert time.monotonic() - began < LIMIT / 2, "a checkout waited for the other endpoint"
        assert not waiting.done()
        proxy.resume()
        assert await waiting is not channel


async def test_healthy_idle_connection_is_kept(echo: EchoServer) -> None:
    async with AsyncConnectionManager(idle=0.2) as manager:
        channel = await manager.get_or_create(config(echo))
        await asyncio.sleep(0.3)
        assert await manager.get_or_create(config(echo)) is channel
        assert line(manager)["generation"] == 1


async def test_channel_is_renewed_before_max_age(echo: EchoServer) -> None:
    async with AsyncConnectionManager(max_age=0.5) as manager:
        channel = await manager.get_or_create(config(echo))
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            assert await call(channel) == b"hello"
            await asyncio.sleep(0.005)
        assert int(str(line(manager)["generation"])) >= 3


# -- a primary that moves --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["refresher first", "error first"])
async def test_clients_follow_the_primary(order: str) -> None:
    with EchoServer() as north, EchoServer() as south:
        known = [Topology(1, (member(north, 3), member(south, 1)))]
        async with AsyncConnectionManager(fetch_topology=lambda: known[-1]) as manager:
            channel = await manager.get_or_create(config(north))
            assert await channel.unary_unary(PID)(b"") == str(north.pid).encode()
            known.append(Topology(2, (member(north, 1), member(south, 3))))
            if order == "error first":
                north.kill()
                with pytest.raises(grpc.RpcError):
                    await call(channel, 5.0)
                await loss_noticed_async(channel)
            else:
                (managed,) = manager._table
                managed.strategy._refresher.trigger()
                async with asyncio.timeout(LIMIT):
                    while managed.strategy.topology.version == 1:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            # From here on, no call goes to the old primary.
            answers = await asyncio.gather(
                *(channel.unary_unary(PID)(b"", timeout=LIMIT) for _ in range(20))
            )
            assert set(answers) == {str(south.pid).encode()}


def member(server: EchoServer, capability: int) -> Member:
    return Member(str(server.port), server.uri, capability)
