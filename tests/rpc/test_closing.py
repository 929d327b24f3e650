"""Calls in flight when a manager is closed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moored.rpc import (
    AsyncConnectionManager,
    AsyncRegularStrategy,
    ConnectionConfig,
    ConnectionManager,
    ManagerClosed,
    RegularStrategy,
)

from .handlers import ECHO
from .servers import EchoServer
from .sides import Kind, Threads, both, config_of
from .test_live_servers import Reader

SLEEP = "/test.Echo/Sleep"
LIMIT = 30.0


async def test_close_lets_calls_in_flight_finish(echo: EchoServer) -> None:
    manager = AsyncConnectionManager()
    channel = await manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
    call = channel.unary_unary(SLEEP)(b"0.3", timeout=LIMIT)
    assert channel.calls == 1
    await manager.close()
    assert call.done()
    assert await call == b"0.3"
    with pytest.raises(ManagerClosed):
        await channel.unary_unary(ECHO)(b"")


def test_close_of_a_thread_manager_lets_calls_in_flight_finish(echo: EchoServer) -> None:
    manager = ConnectionManager()
    channel = manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
    call = channel.unary_unary(SLEEP).future(b"0.3", timeout=LIMIT)
    manager.close()
    assert call.done()
    assert call.result() == b"0.3"
    with pytest.raises(ManagerClosed):
        channel.unary_unary(ECHO)(b"")


async def test_endless_call_delays_close_by_a_limit_only(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", 0.1)
    manager = AsyncConnectionManager()
    channel = await manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
    call = channel.unary_stream("/test.Echo/Endless")(b"0.01")
    assert await call.read() == b"0"
    async with asyncio.timeout(LIMIT):
        await manager.close()
    assert call.done()


def test_endless_call_of_threads_delays_close_by_a_limit_only(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", 0.1)
    manager = ConnectionManager()
    channel = manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
    numbers = channel.unary_stream("/test.Echo/Endless")(b"0.01")
    assert next(numbers) == b"0"
    with ThreadPoolExecutor(1) as other:
        other.submit(manager.close).result(LIMIT)
    assert not numbers.is_active()


@both
async def test_strategy_whose_close_fails_does_not_end_the_wait_for_calls(
    kind: Kind, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", 1.0)
    base: Any = RegularStrategy if kind is Threads else AsyncRegularStrategy

    class Defective(base):  # type: ignore[misc]
        async def close_async(self, managed: Any) -> None:
            raise ValueError("a defect")

    async with kind(strategy=lambda _: Defective()) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        reader = Reader(side, channel)
        assert await reader.read() == b"0"
        await side.run(side.manager.close)
        assert not channel.endpoint.old, "a channel was left open"
