"""Channels that are made at once, without a loop or a thread, and connect at their first call."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
import uvloop
from tests.servers import free_port

from moored import rpc
from moored.rpc import (
    AsyncConnectionManager,
    ChannelError,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
)
from moored.testing import scaled

from .handlers import COUNT, ECHO, eventually
from .servers import EchoServer

LIMIT = 30.0


@pytest.fixture
def late() -> EchoServer:
    """A server that is not started yet."""
    return EchoServer()


def start_later(server: EchoServer, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, server.start)
    timer.start()
    return timer


def test_making_a_channel_starts_nothing() -> None:
    program = f"""
import threading
from moored import rpc
stub = rpc.channel("127.0.0.1:{free_port()}").unary_unary("/any")
other = rpc.aio.channel("127.0.0.1:{free_port()}").unary_unary("/any")
assert threading.active_count() == 1, threading.enumerate()
assert rpc.ConnectionManager.get_instance().get_stats()["total_connections"] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_threads_wait_for_a_server_that_starts_later(late: EchoServer) -> None:
    seconds = scaled(20, least=1)
    channel = rpc.channel(late.address)
    timer = start_later(late, seconds)
    try:
        with ThreadPoolExecutor(20) as pool:
            calls = [pool.submit(channel.unary_unary(ECHO), b"a", LIMIT) for _ in range(20)]
            stream = channel.unary_stream(COUNT)(b"2", timeout=LIMIT)
            assert [each.result(LIMIT) for each in calls] == [b"a"] * 20
            assert list(stream) == [b"0", b"1"]
    finally:
        timer.join()
        late.kill()
        ConnectionManager.get_instance().close_all()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tasks_wait_for_a_server_that_starts_later(late: EchoServer, loop: object) -> None:
    seconds = scaled(20, least=1)
    stub = rpc.aio.channel(late.address).unary_unary(ECHO)  # before there is a loop

    async def call() -> None:
        try:
            calls = (stub(b"a", timeout=LIMIT) for _ in range(20))
            assert await asyncio.gather(*calls) == [b"a"] * 20
        finally:
            await AsyncConnectionManager.get_instance().close()

    timer = start_later(late, seconds)
    try:
        with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
            runner.run(call())
    finally:
        timer.join()
        late.kill()


def test_each_loop_has_a_connection_of_its_own(echo: EchoServer) -> None:
    channel = rpc.aio.channel(echo.address)
    stub = channel.unary_unary(ECHO)

    async def call() -> int:
        assert await stub(b"a", timeout=LIMIT) == b"a"
        await channel.channel_ready()
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        (line,) = AsyncConnectionManager.get_instance().get_stats()["connections"]
        await AsyncConnectionManager.get_instance().close()
        return int(line["generation"])

    assert [asyncio.run(call()) for _ in range(3)] == [1, 1, 1]


async def test_call_after_its_manager_was_closed_opens_a_new_one(echo: EchoServer) -> None:
    channel = rpc.aio.channel(echo.address)
    for _ in range(2):
        assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        await AsyncConnectionManager.get_instance().close()


def test_waiting_call_ends_with_its_timeout_and_says_why(late: EchoServer) -> None:
    channel = rpc.channel(late.address)
    began = time.monotonic()
    with pytest.raises(ConnectFailed, match=f"for a connection to {late.address}") as raised:
        channel.unary_unary(ECHO)(b"", timeout=0.5)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    assert "last failure" in str(raised.value)
    assert time.monotonic() - began < LIMIT / 3
    ConnectionManager.get_instance().close_all()


def test_equal_arguments_share_a_channel_also_before_it_is_connected(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    with ConnectionManager() as manager:
        with ThreadPoolExecutor(8) as pool:
            made = set(pool.map(lambda _: manager.open_channel(config), range(100)))
        (channel,) = made
        assert manager.get_or_create(config, timeout=LIMIT) is channel
        assert manager.get_stats()["connections"][0]["client_count"] == 101
        assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"


def test_channel_that_was_never_called_is_forgotten_with_its_last_reference() -> None:
    with ConnectionManager() as manager:
        channel = manager.open_channel(ConnectionConfig.from_uri("http://nowhere"))
        assert "asleep" in repr(channel)
        del channel
        gc.collect()
        eventually(lambda: not manager._table.all())


def test_connect_waits_as_before(echo: EchoServer, late: EchoServer) -> None:
    channel = rpc.channel(echo.address, connect=True, timeout=LIMIT)
    assert channel.generation == 1
    with pytest.raises(ConnectFailed):
        rpc.channel(late.address, connect=True, timeout=0.2)
    make: Any
    for make in (rpc.channel, rpc.aio.channel):
        with pytest.raises(ConfigError, match="connect=True"):
            make(late.address, timeout=1.0)
    ConnectionManager.get_instance().close_all()


def test_threads_with_loops_of_their_own_keep_one_connection_each(echo: EchoServer) -> None:
    channel = rpc.aio.channel(echo.address)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def work(number: int) -> int:
        async def call() -> int:
            for _ in range(10):
                await asyncio.to_thread(turns[number].acquire)
                assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
                gc.collect()
                turns[1 - number].release()
            stats = AsyncConnectionManager.get_instance().get_stats()
            await channel.close()
            await AsyncConnectionManager.get_instance().close()
            return int(stats["counters"]["connects"])

        return asyncio.run(call())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [1, 1]


async def test_channel_of_any_loop_is_one_for_retries_and_managers(echo: EchoServer) -> None:
    channel = rpc.aio.channel(echo.address)
    manager = AsyncConnectionManager.get_instance()
    retrying = rpc.intercept_aio_channel(channel, rpc.AsyncRetryInterceptor(channel))
    assert await retrying.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"

    class Client:
        handler = channel

        @rpc.retry_on_rpc_failure
        async def ask(self, *, timeout: float) -> bytes:
            answer: bytes = await channel.unary_unary(ECHO)(b"b", timeout=timeout)
            return answer

    assert await Client().ask(timeout=LIMIT) == b"b"
    assert manager.renew(channel)
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
    )
    assert await manager.handle_error(channel, error, LIMIT)
    assert (channel.generation, channel.address) == (2, echo.address)
    await manager.release(channel)
    await manager.close()


def test_slow_credentials_of_one_server_delay_no_other(echo: EchoServer) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def credentials(config: ConnectionConfig) -> None:
        if config.address.startswith("slow"):
            asked.set()
            assert may_end.wait(LIMIT)

    with ConnectionManager(credentials=credentials) as manager:
        channel = manager.open_channel(ConnectionConfig.from_uri(echo.uri))
        slow = ConnectionConfig.from_uri("http://slow")
        opening = threading.Thread(target=manager.open_channel, args=(slow,))
        opening.start()
        try:
            assert asked.wait(LIMIT)
            assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT / 3) == b"a"
        finally:
            may_end.set()
            opening.join()


async def test_channel_is_not_opened_from_another_loop(echo: EchoServer) -> None:
    async with AsyncConnectionManager() as manager:

        async def elsewhere() -> None:
            manager.open_channel(ConnectionConfig.from_uri(echo.uri))

        with pytest.raises(ChannelError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
