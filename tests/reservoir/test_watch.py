"""The watch of a pool in virtual time: when it probes a server, and what counts as its answer."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from tests.leases.virtual import in_virtual_time

from moored.kernel import Clock
from moored.reservoir import AsyncConnectionPool, ConnectionPool, ReservoirConfig
from moored.reservoir._driver import Driver, DriverState
from moored.reservoir._silence import LOOK
from moored.testing import Sim

#: Seconds within which a silence is reported.
PROMISED = 5.0


class Conn:
    busy = False


class Server(Driver):
    """A server, and the driver of its connections, which know whether a statement is running."""

    def __init__(self) -> None:
        super().__init__(self._accept)
        self.answers, self.accepts = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.accepts.set()
        self.opened = self.pings = 0

    @asynccontextmanager
    async def pool(self, size: int, **settings: Any) -> AsyncIterator[AsyncConnectionPool[Any]]:
        """Open a full pool whose connections stay for ever."""
        config = ReservoirConfig(max_size=size, base_lifetime=1e6, start_stagger=0.0).but(
            **settings
        )
        pool = AsyncConnectionPool(config=config, connect=self._accept, endpoint="db", open=False)
        pool.reservoir.recipe._use(self)
        async with pool:
            await pool.wait()
            self.opened = 0
            yield pool
            self.answers.set()
            self.accepts.set()

    async def _accept(self) -> Conn:
        self.opened += 1
        await self.accepts.wait()
        await self.answers.wait()
        return Conn()

    def state(self, conn: Conn) -> DriverState:
        return DriverState.BUSY if conn.busy else DriverState.IDLE

    def busy(self, conn: Conn) -> bool:
        return conn.busy

    async def ping(self, conn: Conn, timeout: float) -> None:
        self.pings += 1
        async with asyncio.timeout(timeout):
            await self.answers.wait()

    async def execute(self, conn: Conn, seconds: float) -> None:
        """Run a statement that takes so long, or until the server answers again."""
        conn.busy = True
        await asyncio.sleep(seconds)
        await self.answers.wait()
        conn.busy = False

    async def work(self, pool: AsyncConnectionPool[Any], seconds: float, pause: float) -> None:
        """Run such statements on and on, each on a connection of its own."""
        while True:
            async with pool.connection() as conn:
                await self.execute(conn, seconds)
            await asyncio.sleep(pause)


@asynccontextmanager
async def working(*work: Any) -> AsyncIterator[None]:
    """Run these coroutines meanwhile."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def longest_silence(pool: AsyncConnectionPool[Any], seconds: float) -> float:
    """Look for so long; return the longest silence that the pool reports meanwhile."""
    ends, longest = Clock.current().monotonic() + seconds, 0.0
    while Clock.current().monotonic() < ends:
        longest = max(longest, pool.silent_for)
        await asyncio.sleep(0.1)
    return longest


@in_virtual_time
async def test_a_probe_that_waits_for_the_rate_limit_is_no_silence(sim: Sim) -> None:
    server = Server()
    async with (
        server.pool(2, rate=0.05, burst=2) as pool,
        working(server.work(pool, 60.0, 0.0), server.work(pool, 60.0, 0.0)),
    ):
        assert await longest_silence(pool, 30.0) == 0.0
        assert server.opened == 1


@in_virtual_time
async def test_a_second_silence_is_reported_while_the_probe_of_the_first_has_no_answer(
    sim: Sim,
) -> None:
    server = Server()
    async with server.pool(1) as pool, working(server.work(pool, 0.1, 0.0)):
        server.accepts.clear()  # the connection of the probe opens neither now nor later
        for _ in range(2):
            server.answers.clear()
            assert await longest_silence(pool, PROMISED) > 0.0
            server.answers.set()
            await asyncio.sleep(2 * LOOK)
            assert pool.silent_for == 0.0


@in_virtual_time
async def test_a_statement_that_ends_is_an_answer_of_a_server_that_accepts_nobody(sim: Sim) -> None:
    server = Server()
    async with server.pool(2) as pool:
        server.accepts.clear()
        async with working(server.work(pool, 60.0, 0.0), server.work(pool, 1.1, 0.0)):
            assert await longest_silence(pool, 50.0) == 0.0


@in_virtual_time
async def test_a_connection_that_is_held_for_long_sends_no_probe(sim: Sim) -> None:
    """Its short statements are not as old as its checkout."""
    server = Server()
    async with server.pool(1) as pool, pool.connection() as conn:
        for _ in range(300):
            await server.execute(conn, 0.4)
            await asyncio.sleep(0.6)
        assert server.opened == 0


@in_virtual_time
async def test_pauses_between_statements_do_not_make_probes_frequent(sim: Sim) -> None:
    server = Server()
    async with server.pool(1) as pool, working(server.work(pool, 1.8, 0.7)):
        await asyncio.sleep(300.0)
        assert 5 <= server.opened <= 300 / 16 + 5


@in_virtual_time
async def test_a_ready_connection_is_pinged_instead_of_opening_one(sim: Sim) -> None:
    server = Server()
    async with server.pool(2) as pool, working(server.work(pool, 300.0, 0.0)):
        await asyncio.sleep(100.0)
        assert server.opened == 0
        assert 10 <= server.pings <= 110


@in_virtual_time
async def test_a_frozen_server_is_reported_each_time_whatever_runs(sim: Sim) -> None:
    """With ready connections, with none, and beside a legitimate statement that takes long."""
    for size, statements in ((4, [0.1]), (2, [0.1, 0.1, 0.1]), (4, [500.0, 0.1]), (4, [500.0])):
        server = Server()
        async with (
            server.pool(size) as pool,
            working(*(server.work(pool, each, 0.05) for each in statements)),
        ):
            for _ in range(2):
                assert await longest_silence(pool, sim.random(30.0, 50.0)) == 0.0
                server.answers.clear()
                began = Clock.current().monotonic()
                while not pool.silent_for:
                    assert Clock.current().monotonic() - began < PROMISED
                    await asyncio.sleep(0.01)
                server.answers.set()
                await asyncio.sleep(1.0)


@in_virtual_time
async def test_is_broken_is_not_called_for_connections_in_use(sim: Sim) -> None:
    """A function of the user's may not be prepared for one that is working."""
    in_use: list[object] = []
    called: list[object] = []

    async def connect() -> object:
        return object()

    def is_broken(conn: object) -> bool:
        called.extend(each for each in in_use if each is conn)
        return False

    pool = AsyncConnectionPool(connect=connect, is_broken=is_broken, endpoint="db", max_size=2)
    async with pool:
        await pool.wait()
        async with pool.connection() as conn:
            in_use.append(conn)
            await asyncio.sleep(10.0)
            in_use.clear()
    assert called == []


def test_threads_may_ask_while_pools_to_the_same_server_open_and_close() -> None:
    ends = threading.Event()

    def pool() -> ConnectionPool[Any]:
        return ConnectionPool(connect=object, endpoint="many pools", max_size=1)

    def ask(pool: ConnectionPool[Any]) -> None:
        pool.wait()
        while not ends.is_set():
            assert pool.silent_for == 0.0

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(ask, stack.enter_context(pool())) for _ in range(2)]
            stack.callback(ends.set)
            for _ in range(20):
                stack.enter_context(pool())
            ends.wait(2 * LOOK)
            stack.close()
            for each in asking:
                each.result()
    finally:
        sys.setswitchinterval(interval)
