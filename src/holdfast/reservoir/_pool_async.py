"""The pool for asyncio."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from holdfast.kernel import describe

from ._core import Waiter
from ._driver import State
from ._errors import PoolTimeout
from ._item import Item
from ._pool import PING_TIMEOUT, Pool
from ._recipe import settled as awaited

__all__ = ["AsyncConnectionPool"]

log = logging.getLogger("holdfast.reservoir")

C = TypeVar("C")

# Who takes a connection is noted each time, and 3.11's own way to ask takes as long as the rest.
if sys.version_info < (3, 12):
    _task_of: Callable[[Any], Any] = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
else:
    _task_of = asyncio.current_task


class _AsyncWaiter(Waiter[C]):
    __slots__ = ("future",)

    def __init__(
        self, since: float, deadline: float, holder: Any, future: asyncio.Future[None]
    ) -> None:
        super().__init__(since, deadline, holder)
        self.future = future

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class AsyncConnectionPool(Pool[C]):
    """A pool for asyncio whose connections are ready before they are needed.

    `async with pool.connection() as conn` gives the driver's own connection; at the end its
    transaction is committed, or rolled back if the block raised. All parameters of psycopg_pool
    are taken; these are new:

    :param config: every setting of the reservoir at once, for example from `from_env`.
    :param creation_rate: how many connections may be opened per second (100).
    :param creation_burst: how many of them at once.
    :param tokens: makes passwords that end after a while, for example `aws.DsqlTokens(…)`.
    :param leases: the URL of a lease store, or a client: limits the connections of the cluster.
    :param connect: another driver's function, for example `asyncpg.connect`; it is called with the
        conninfo, if there is one, and `kwargs`.
    :param is_broken: tells whether a connection is of no use, without asking the server.
    :param ping: asks the server for a sign of life, or raises.
    :param close_connection: closes a connection.
    :param check_idle: a connection unused for so many seconds is pinged before it is handed out;
        None never does.
    :param leak_after: warn, with the place in the code, when one is in use for so many seconds.
    :param queue_target: how long a checkout may wait, in the best case of an interval.
    :param queue_interval: how long that interval is; after one in which every checkout waited
        longer, new callers get `PoolOverloaded` at once.
    :param endpoint: what to call the server in leases, rate limits and metrics.
    :param service: the service's name in leases and metrics; the program's, if not given.
    """

    _asynchronous = True

    def _set_up(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(
        self,
        wait: bool = False,
        timeout: float = 30.0,
        progress: Callable[[str], object] | None = None,
    ) -> None:
        """Begin to fill; with `wait`, until the low watermark is reached.

        When that takes longer than the timeout, the pool is open all the same, with a warning:
        whoever wants an error instead calls `wait()`.
        """
        if self.reservoir.state == "open":
            return
        self._loop = asyncio.get_running_loop()
        self._nothing = self._loop.create_future()
        self._nothing.set_result(None)
        await self.reservoir.start()
        if wait:
            number = max(1, self._core.watermark)
            if not await self.reservoir.wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    async def wait(self, timeout: float = 30.0) -> None:
        """Wait until all connections that are to be kept are there; else `PoolTimeout`, and the
        pool is closed."""
        self.reservoir.check_open()
        number = self._core.target
        if not await self.reservoir.wait_ready(number, timeout):
            text = self._not_full(number, timeout)
            await self.close()
            raise PoolTimeout(text)

    async def close(self, timeout: float = 5.0) -> None:
        """Hand out nothing more, tell those who wait, and close all connections.

        Those in use are closed when they come back. What does not close in time is left alone.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self.reservoir.stop(timeout)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- use -----------------------------------------------------------------------------------

    def connection(self, timeout: float | None = None) -> _Checkout[C]:
        """`async with pool.connection() as conn`: a connection, and the end of its transaction."""
        return _Checkout(self, timeout)

    async def getconn(self, timeout: float | None = None) -> C:
        """A connection, to be given back with `putconn()`; better use `connection()`."""
        return (await self._checkout(timeout)).conn

    async def putconn(self, conn: C) -> None:
        """Give back what `getconn()` gave; an open transaction is rolled back, with a warning."""
        await self._release(self._item_of(conn))

    async def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Keep so many connections from now on, and at most so many."""
        self._resize(min_size, max_size)

    async def check(self) -> None:
        """Ask every ready connection for a sign of life, and replace those that give none."""
        for item in list(self._core.ready):
            if self._core.pick(item, self._monotonic()) and await self._is_fit(item, always=True):
                self.reservoir.carry_out(self._core.put(item, self._monotonic()))

    async def drain(self) -> None:
        """Replace all connections: the ready ones now, those in use when they come back."""
        with self.reservoir.lock:
            self._core.drain()
        self.reservoir.carry_out(None)

    # -- checkout ------------------------------------------------------------------------------

    async def _checkout(self, timeout: float | None) -> Item[C]:
        """A connection that was looked at, after waiting for it if need be."""
        if self._opens_itself and self.reservoir.state == "new":
            await self.open()
        self.reservoir.check_open()
        holder = _task_of(self._loop)
        timeout = self.timeout if timeout is None else timeout
        began = self._monotonic()
        deadline = began + timeout
        while True:
            item = self.reservoir.obtain(self._monotonic(), holder)
            if item is None:
                item = await self._wait(began, deadline, timeout, holder)
            if await self._is_fit(item):
                return item

    async def _wait(self, began: float, deadline: float, timeout: float, holder: Any) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        now = self._monotonic()
        if (why := core.refuses(now)) is not None:
            raise self._refused(why)
        assert self._loop is not None
        waiter: _AsyncWaiter[C] = _AsyncWaiter(now, deadline, holder, self._loop.create_future())
        core.enqueue(waiter)
        self._set_timer(deadline)
        reservoir.works.nudge()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if (item := core.leave(waiter, self._monotonic())) is not None:
                reservoir.carry_out(core.give(item, self._monotonic()))
            raise
        if isinstance(waiter.error, TimeoutError):
            raise self._timed_out(timeout)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.item is not None
        reservoir.latency.add(self._monotonic() - began)
        reservoir.mark(waiter.item, holder)
        return waiter.item

    def _set_timer(self, deadline: float) -> None:
        """One timer for all who wait: for the first of them whose time will be over."""
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        if deadline < float("inf"):
            assert self._loop is not None
            delay = deadline - self._monotonic()
            self._timer = self._loop.call_later(delay, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        for waiter in self._core.expire(self._monotonic()):
            waiter.error = TimeoutError()
            waiter.wake()
        if self._core.waiting:
            self._set_timer(min(waiter.deadline for waiter in self._core.waiting))

    async def _is_fit(self, item: Item[C], *, always: bool = False) -> bool:
        """Whether it can be handed out; if not, it is let go."""
        if self._check is None and not always and not self._must_ping(item):
            return True
        try:
            if self._check is not None:
                await awaited(self._check(item.conn))
            else:
                await awaited(self.reservoir.recipe.driver.ping(item.conn, PING_TIMEOUT))
        except BaseException as error:
            self._failed_check(item, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # -- return --------------------------------------------------------------------------------

    async def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        driver, conn = self.reservoir.recipe.driver, item.conn
        try:
            if driver.is_broken(conn):
                return
            if error is None:
                await awaited(driver.commit(conn))
                return
            if driver.suspects(conn, error):
                await awaited(driver.ping(conn, PING_TIMEOUT))
            await awaited(driver.rollback(conn))
        except Exception as failure:
            if error is None:
                raise
            log.warning("%s: rollback failed: %s", self.name, describe(failure))
        finally:
            await self._release(item, settled=True)

    async def _release(self, item: Item[C], *, settled: bool = False) -> None:
        """Give back a connection, made clean first."""
        try:
            clean = await self._clean(item, settled)
        except BaseException:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            raise
        if not clean:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            return
        self.reservoir.carry_out(self._core.give(item, self._monotonic()))

    async def _clean(self, item: Item[C], settled: bool) -> bool:
        driver, conn = self.reservoir.recipe.driver, item.conn
        state = self._state_of(conn, settled)
        if state is State.TRANSACTION:
            self._warn_open_transaction(conn)
            try:
                await awaited(driver.rollback(conn))
            except Exception as error:
                log.warning("%s: rollback failed: %s", self.name, describe(error))
                return False
            state = self._state_of(conn, settled=True)
        if state is not State.IDLE:
            log.warning("%s: closing a connection that came back %s", self.name, state.value)
            return False
        if self._reset is not None:
            try:
                await awaited(self._reset(conn))
            except Exception as error:
                log.warning("%s: the reset callback failed: %s", self.name, describe(error))
                return False
            return self._state_of(conn, settled=True) is State.IDLE
        return True


class _Checkout(Generic[C]):
    """The block of `connection()`. The usual case, in which one is ready and comes back clean, does
    as little as it can."""

    __slots__ = ("_item", "_pool", "_timeout")

    def __init__(self, pool: AsyncConnectionPool[C], timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout

    def __aenter__(self) -> Awaitable[C]:
        pool = self._pool
        item = pool._take(pool._monotonic())
        if item is None:
            return self._wait()
        item.holder = _task_of(pool._loop)
        self._item = item
        at_hand: Awaitable[C] = item.at_hand
        return at_hand

    async def _wait(self) -> C:
        self._item = item = await self._pool._checkout(self._timeout)
        return item.conn

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Awaitable[None]:
        item, pool = self._item, self._pool
        if error is None and pool._is_clean(item.conn):
            waiter = pool._give(item, pool._monotonic())
            if waiter is not None or pool._retired:
                pool.reservoir.carry_out(waiter)
            return pool._nothing
        return pool._finish(item, error)
