"""Hundreds of opened and closed connections leak neither memory, descriptors nor threads.

Usage is compared with that after a warm-up: the first cycles fill caches of the interpreter and of
gRPC.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Clock
from moored.rpc import AsyncConnectionManager, ConnectionConfig, ConnectionManager
from moored.rpc._background import Background
from moored.rpc._endpoint import PAUSES, Endpoint, Live
from moored.testing import mutant, scaled

from .handlers import ECHO, FAIL, descriptors, own_threads
from .servers import EchoServer
from .sides import aborted

LIMIT = 30.0
WARM_UP = scaled(30, least=10)
#: What a cycle may leak on average; a channel that is not closed leaks far more.
PYTHON_BYTES, RESIDENT_BYTES = 50, 6_000


class Usage(NamedTuple):
    """What this process uses."""

    descriptors: int
    threads: int
    python: int
    resident: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        return cls(descriptors(), own_threads(), tracemalloc.get_traced_memory()[0], resident())


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Leaping(Clock):
    """The system's clock with jumps, so that a young connection may be replaced."""

    def __init__(self) -> None:
        self.ahead = 0.0
        super().__init__(lambda: time.monotonic() + self.ahead)

    def leap(self) -> None:
        self.ahead += PAUSES.proven


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def check_flat(before: Usage, after: Usage, cycles: int) -> None:
    """Check that nothing has grown with the number of cycles."""
    message = f"{cycles} cycles: {before} became {after}"
    assert after.descriptors <= before.descriptors + 3, message
    assert after.threads <= before.threads + 2, message
    assert after.python - before.python <= cycles * PYTHON_BYTES + 80_000, message
    assert after.resident - before.resident <= cycles * RESIDENT_BYTES + 1_500_000, message


def check_flat_eventually(before: Usage, cycles: int) -> None:
    """Check repeatedly: gRPC's threads end a little after the last close."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            check_flat(before, Usage.now(), cycles)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


# -- threads ---------------------------------------------------------------------------------------


class Client:
    """A client object, for `client=`."""


def cycle(config: ConnectionConfig, number: int) -> None:
    """Create, use, recover, use, close."""
    clock = Leaping()
    with ConnectionManager(clock=clock, classify=aborted) as manager:
        client = Client()
        channel = manager.get_or_create(config, dedicated=number % 2 == 0, client=client)
        assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        recover(manager, channel, clock)
        assert channel.unary_unary(ECHO)(b"b", timeout=LIMIT) == b"b"
        assert channel.generation == 2
        manager.release(channel, client)


def recover(manager: ConnectionManager, channel: grpc.Channel, clock: Leaping) -> None:
    clock.leap()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(FAIL)(b"ABORTED", timeout=LIMIT)
    assert manager.handle_error(channel, caught.value, timeout=LIMIT)


def run_cycles(config: ConnectionConfig, cycles: int) -> None:
    with traced():
        for number in range(WARM_UP):
            cycle(config, number)
        before = Usage.now()
        for number in range(cycles):
            cycle(config, number)
        check_flat_eventually(before, cycles)


def test_managers_for_threads_leak_nothing(echo: EchoServer) -> None:
    run_cycles(ConnectionConfig.from_uri(echo.uri), scaled(1000, least=20))


@pytest.mark.soak
def test_dedicated_connections_of_one_manager_leak_nothing(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    cycles = scaled(1000, least=20)
    clock = Leaping()
    with traced(), ConnectionManager(clock=clock, classify=aborted) as manager:

        def once() -> None:
            channel = manager.get_or_create(config, dedicated=True)
            recover(manager, channel, clock)
            assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
            manager.release(channel)

        # The recorder keeps the newest events: it must be full before anything is compared.
        for _ in range(WARM_UP + 256 // 5):
            once()
        before = Usage.now()
        for _ in range(cycles):
            once()
        check_flat_eventually(before, cycles)


@pytest.mark.soak
def test_repeated_recoveries_leak_nothing(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    clock = Leaping()
    with traced(), ConnectionManager(clock=clock, classify=aborted) as manager:
        channel = manager.get_or_create(config)
        for _ in range(WARM_UP + 256 // 3):
            recover(manager, channel, clock)
        before = Usage.now()
        cycles = scaled(300, least=30)
        for _ in range(cycles):
            recover(manager, channel, clock)
        check_flat_eventually(before, cycles)


# -- defects that must be noticed ------------------------------------------------------------------

_leaked: list[Any] = []


async def _leaves_channels_open(self: Background, endpoint: Endpoint, live: Live) -> None:
    """Keep the channel of a replaced generation open."""
    _leaked.append(live.channel)
    self._gone(endpoint, live)


@mutant(
    Background, "_close_channel", _leaves_channels_open, name="replaced channels are never closed"
)
def test_mutant_that_never_closes_channels_is_caught(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    try:
        with traced():
            before = Usage.now()
            for number in range(20):
                cycle(config, number)
            with pytest.raises(AssertionError, match="cycles: Usage"):
                check_flat(before, Usage.now(), 20)
    finally:
        for channel in _leaked:
            channel.close()
        _leaked.clear()


# -- asyncio ---------------------------------------------------------------------------------------


async def cycle_async(config: ConnectionConfig, number: int) -> None:
    clock = Leaping()
    async with AsyncConnectionManager(clock=clock, classify=aborted) as manager:
        client = Client()
        channel = await manager.get_or_create(config, dedicated=number % 2 == 0, client=client)
        assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        clock.leap()
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(FAIL)(b"ABORTED", timeout=LIMIT)
        assert await manager.handle_error(channel, caught.value, timeout=LIMIT)
        assert await channel.unary_unary(ECHO)(b"b", timeout=LIMIT) == b"b"
        assert channel.generation == 2
        await manager.release(channel, client)


async def test_managers_for_asyncio_leak_nothing(echo: EchoServer) -> None:
    config, cycles = ConnectionConfig.from_uri(echo.uri), scaled(1000, least=20)
    loop = asyncio.get_running_loop()
    loop.set_debug(False)  # it would keep the traceback of each task
    with traced():
        for number in range(WARM_UP):
            await cycle_async(config, number)
        before = Usage.now()
        for number in range(cycles):
            await cycle_async(config, number)
        await asyncio.to_thread(check_flat_eventually, before, cycles)


def test_loops_in_a_row_leak_no_manager(echo: EchoServer) -> None:
    """Whether or not the manager of the loop was closed."""
    config = ConnectionConfig.from_uri(echo.uri)
    left: list[weakref.ref[AsyncConnectionManager]] = []

    async def use(close: Callable[[AsyncConnectionManager], Awaitable[None]] | None) -> None:
        manager = AsyncConnectionManager.get_instance()
        left.append(weakref.ref(manager))
        channel = await manager.get_or_create(config)
        assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        if close is not None:
            await close(manager)

    for _ in range(10):
        asyncio.run(use(AsyncConnectionManager.close))
    for _ in range(10):
        asyncio.run(use(None))
    gc.collect()
    assert [each() for each in left] == [None] * 20
    assert not AsyncConnectionManager._instances
