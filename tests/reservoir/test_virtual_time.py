"""Replacement, leases, pings and overload in virtual time, with exact numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.leases.virtual import in_virtual_time

from moored.kernel import Clock
from moored.leases import Leases, MemoryStore
from moored.reservoir import AsyncConnectionPool, PoolTimeout, ReservoirConfig
from moored.testing import Sim


class Server:
    """A server whose connections are plain objects; it notes when each was opened."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.opened: list[float] = []
        #: Whether idle connections do not answer, and how many were pinged.
        self.silent = False
        self.pings = 0

    async def connect(self) -> object:
        await asyncio.sleep(0.01)
        self.opened.append(self._clock.monotonic())
        return object()

    async def ping(self, conn: object) -> None:
        self.pings += 1
        if self.silent:
            await asyncio.sleep(5.0)
            raise ConnectionError("no answer")

    def pool(self, size: int, **settings: Any) -> AsyncConnectionPool[object]:
        config = settings.pop("config", None) or ReservoirConfig(max_size=size)
        return AsyncConnectionPool(
            connect=self.connect,
            ping=self.ping,
            config=config.but(max_size=size),
            endpoint="db",
            open=False,
            **settings,
        )


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - virtual time costs nothing
        await asyncio.sleep(0.01)


@in_virtual_time
async def test_connections_opened_together_are_replaced_one_by_one(
    sim: Sim,
) -> None:
    """The schedule is made when the filling ends, not at the next look at all of them."""
    server = Server(Clock.current())
    config = ReservoirConfig(base_lifetime=2.2, lifetime_jitter=0.0, guard_window=0.2)
    async with server.pool(10, config=config) as pool:
        await pool.wait()
        await asyncio.sleep(6.0)
    gaps = [later - one for one, later in zip(server.opened[9:], server.opened[10:], strict=False)]
    assert len(gaps) >= 28
    assert min(gaps) >= 0.95 * 2.0 / 10, gaps


@in_virtual_time
async def test_delayed_replacements_are_made_up_for(sim: Sim) -> None:
    """A connection in use cannot be replaced; when it is back, the next ones do not wait in turn
    until their life is over."""
    server = Server(Clock.current())
    config = ReservoirConfig(base_lifetime=10.2, lifetime_jitter=0.0, guard_window=0.2)
    async with server.pool(10, config=config) as pool:
        await pool.wait()
        taken = [await pool.getconn() for _ in range(10)]
        await asyncio.sleep(5.5)
        for conn in taken:
            await pool.putconn(conn)
        await asyncio.sleep(5.0)
        # The last of them may stay until its end; no two end together.
        assert pool.statistics().discards == {"replaced_ahead": 9, "guard_on_scan": 1}


@in_virtual_time
async def test_a_released_lease_is_used_again_without_the_backoff(sim: Sim) -> None:
    clock = Clock.current()
    server = Server(clock)
    config = ReservoirConfig(lease_limit=3)
    async with Leases(MemoryStore(clock=clock)) as leases:
        one = server.pool(2, config=config, leases=leases)
        two = server.pool(2, config=config, leases=leases)
        async with one, two:
            await until(lambda: len(server.opened) == 3)
            short = two if two.statistics().size == 1 else one
            await asyncio.sleep(60.0)
            # By now it waits for five seconds and more between two tries.
            began = clock.monotonic()
            await short.drain()
            await until(lambda: len(server.opened) == 4)
            assert clock.monotonic() - began < 0.1


@in_virtual_time
async def test_after_a_failed_ping_all_idle_connections_are_pinged_together(sim: Sim) -> None:
    clock = Clock.current()
    server = Server(clock)
    async with server.pool(6, check_idle=30.0) as pool:
        await pool.wait()
        await asyncio.sleep(60.0)
        server.silent = True
        began = clock.monotonic()
        async with pool.connection():
            pass
        # The first gave no sign of life within five seconds, and a new one was opened instead.
        assert clock.monotonic() - began < 5.1
        await asyncio.sleep(5.0)
        assert pool.statistics().discards == {"failed_check": 6}
        assert server.pings == 6


@in_virtual_time
async def test_a_cancelled_check_replaces_the_connection_that_it_was_pinging(sim: Sim) -> None:
    server = Server(Clock.current())
    async with server.pool(2) as pool:
        await pool.wait()
        server.silent = True
        checking = asyncio.create_task(pool.check())
        await until(lambda: server.pings == 1)
        checking.cancel()
        await asyncio.wait([checking])
        assert checking.cancelled()
        assert pool.statistics().discards == {"failed_check": 1}
        async with pool.connection(), pool.connection(timeout=1.0):
            pass


@in_virtual_time
async def test_a_connection_whose_is_broken_raises_is_replaced(sim: Sim) -> None:
    failing: set[object] = set()

    def is_broken(conn: object) -> bool:
        if conn in failing:
            raise ValueError("a defect of the callback")
        return False

    config = ReservoirConfig(scan_every=1000.0)
    async with Server(Clock.current()).pool(1, config=config, is_broken=is_broken) as pool:
        async with pool.connection() as first:
            pass
        await asyncio.sleep(10.0)  # no longer fresh
        failing.add(first)
        with pytest.raises(ValueError, match="a defect of the callback"):
            async with pool.connection(timeout=1.0) as second:
                failing.add(second)
        async with pool.connection(timeout=1.0) as third:
            assert third not in failing
        assert pool.statistics().discards == {"bad": 2}


@in_virtual_time
async def test_a_connect_that_waited_for_a_token_takes_another_turn(sim: Sim) -> None:
    clock = Clock.current()
    server = Server(clock)

    async def token() -> str:
        await asyncio.sleep(2.0)
        return "secret"

    async def connect(password: str) -> object:
        return await server.connect()

    config = ReservoirConfig(max_size=8, rate=10.0, burst=2, start_stagger=0.0)
    pool = AsyncConnectionPool(
        connect=connect, config=config, tokens=token, endpoint="db", open=False
    )
    async with pool:
        await pool.wait()
    for number, start in enumerate(server.opened):
        within = [at for at in server.opened[number:] if at <= start + 0.3]
        assert len(within) <= 0.3 * 10.0 + 2


@in_virtual_time
async def test_a_checkout_without_a_wait_ends_the_overload(sim: Sim) -> None:
    server = Server(Clock.current())
    async with server.pool(1, queue_target=1.0, queue_interval=2.0) as pool:
        await pool.wait()

        async def call() -> None:
            try:
                async with pool.connection(timeout=60.0):
                    await asyncio.sleep(1.5)
            except PoolTimeout:
                pass

        calls = [asyncio.create_task(call()) for _ in range(8)]
        await until(lambda: pool.statistics().overloaded)
        await asyncio.gather(*calls)
        async with pool.connection():
            assert not pool.statistics().overloaded
