"""The pool for asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self

from moored.kernel import describe

from ._core import Waiter
from ._driver import State
from ._errors import PoolClosed, PoolTimeout
from ._item import Item
from ._pool import PING_TIMEOUT, Pool
from ._psycopg import driver
from ._recipe import settled as awaited
from ._types import AsyncC as C

__all__ = ["AsyncConnectionPool"]

log = logging.getLogger("moored.reservoir")

# Who takes a connection is noted each time, and 3.11's own way to ask takes as long as the rest.
if sys.version_info < (3, 12):
    _task_of: Callable[[Any], Any] = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
else:
    _task_of = asyncio.current_task


class _AsyncWaiter(Waiter[C]):
    __slots__ = ("future",)

    future: asyncio.Future[None]

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
        self._timer_at = 0.0

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
        if self.reservoir.state != "open":
            self._loop = asyncio.get_running_loop()
            self._nothing: Any = self._loop.create_future()
            self._nothing.set_result(None)
            await self.reservoir.start()
        if wait:
            number = self._number_to_start_with()
            if not await self.reservoir.wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    async def wait(self, timeout: float = 30.0) -> None:
        """Wait until all connections that are to be kept are there; else `PoolTimeout`, and the
        pool is closed."""
        await self._get_usable()
        number = self._core.target
        if not await self.reservoir.wait_ready(number, timeout):
            text = self._not_full(number, timeout)
            await self.close()
            raise PoolTimeout(text)

    async def close(self, timeout: float = 5.0) -> None:
        """Hand out nothing more, tell those who wait, and close all connections.

        Those in use are closed when they come back. What does not close in time is left alone.
        """
        if self.reservoir.usable and self._loop is not asyncio.get_running_loop():
            self._close_elsewhere()
            return
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
        checkout: _Checkout[C] = _Checkout()
        checkout._pool = self
        checkout._timeout = timeout
        return checkout

    async def getconn(self, timeout: float | None = None) -> C:
        """A connection, to be given back with `putconn()`; better use `connection()`."""
        return self._by_hand(await self._checkout(timeout))

    async def putconn(self, conn: C) -> None:
        """Give back what `getconn()` gave; an open transaction is rolled back, with a warning."""
        await self._release(self._item_of(conn))

    async def _return(self, conn: C) -> None:
        if (item := self._claim(conn)) is not None:
            await self._release(item)

    async def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Keep so many connections from now on, and at most so many."""
        self._resize(min_size, max_size)

    async def check(self) -> None:
        """Ask every ready connection for a sign of life, and replace those that give none."""
        self._check_process()
        for item in list(self._core.ready):
            picked = self._core.pick(item, self._monotonic())
            if picked and await self._is_fit(item, ping=True):
                self.reservoir.carry_out(self._core.put(item, self._monotonic()))

    async def drain(self) -> None:
        """Replace all connections: the ready ones now, those in use when they come back."""
        self._drain()

    @staticmethod
    async def check_connection(conn: Any) -> None:
        """Ask a psycopg connection for a sign of life: a `check` for every checkout."""
        await awaited(driver(None, asynchronous=True).ping(conn, PING_TIMEOUT))

    # -- checkout ------------------------------------------------------------------------------

    async def _checkout(self, timeout: float | None) -> Item[C]:
        """A connection that was looked at, after waiting for it if need be."""
        if not self._usable:
            await self._get_usable()
        if self._loop is not asyncio.get_running_loop():
            raise PoolClosed(self._on_another_loop())
        holder = _task_of(self._loop)
        timeout = self.timeout if timeout is None else timeout
        now = began = self._monotonic()
        while True:
            item = self.reservoir.obtain(now, holder)
            if item is None:
                item = await self._wait(now, began, timeout, holder)
            if not self._must_look(item):
                return item
            if await self._is_fit(item, began + timeout):
                if not self._came_too_late(item):
                    return item
                self._unfit += 1
            else:
                self._unfit += 1
                self._suspect_others()
                await asyncio.sleep(self._pause(item, began, timeout))
            # Meanwhile it may have been closed.
            self.reservoir.check_open()
            now = self._monotonic()

    def _on_another_loop(self) -> str:
        assert self._loop is not None
        over = ", which has ended" if self._loop.is_closed() else ""
        return (
            f"{self.name} was opened on another event loop{over}, and its connections work there "
            "alone: make a pool on each loop, and close it before the loop ends"
        )

    def _close_elsewhere(self) -> None:
        from ._beneath import abandon

        assert self._loop is not None
        if not self._loop.is_closed():
            raise RuntimeError(self._on_another_loop())
        abandon(self)

    async def _get_usable(self) -> None:
        if self._opens_itself and self.reservoir.state == "new":
            await self.open()
        self.reservoir.check_open()

    async def _wait(self, now: float, began: float, timeout: float, holder: Any) -> Item[C]:
        reservoir = self.reservoir
        core = reservoir.core
        if (why := core.refuses(now)) is not None:
            raise self._refused(why)
        assert self._loop is not None
        waiter: _AsyncWaiter[C] = _AsyncWaiter(now, began + timeout, holder)
        waiter.future = self._loop.create_future()
        core.enqueue(waiter)
        self._set_timer(waiter.deadline)
        if core.can_grow:
            reservoir.works.nudge()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if (item := core.leave(waiter, self._monotonic())) is not None:
                reservoir.carry_out(core.give(item, self._monotonic()))
            raise
        if (item := waiter.item) is None:
            if waiter.error is None or isinstance(waiter.error, TimeoutError):
                raise self._timed_out(timeout)
            raise waiter.error
        reservoir.latency.add(self._monotonic() - began)
        if reservoir.leak_after is not None:
            reservoir.mark(item, holder)
        return item

    def _set_timer(self, deadline: float) -> None:
        """One timer for all who wait: for the first of them whose time will be over."""
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        if deadline < float("inf"):
            assert self._loop is not None
            self._timer_at = deadline
            self._timer = self._loop.call_later(deadline - self._monotonic(), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        for waiter in self._core.expire(self._monotonic()):
            waiter.error = TimeoutError()
            waiter.wake()
        if self._core.waiting:
            self._set_timer(min(waiter.deadline for waiter in self._core.waiting))

    async def _is_fit(
        self, item: Item[C], deadline: float = math.inf, *, ping: bool = False
    ) -> bool:
        """Whether it gives a sign of life before the deadline; if not, it is let go."""
        try:
            if self._check is not None and not ping:
                async with asyncio.timeout(PING_TIMEOUT):
                    await awaited(self._check(item.conn))
            else:
                driver = self.reservoir.recipe.driver
                await awaited(driver.ping(item.conn, self._patience(deadline)))
        except BaseException as error:
            self._failed_check(item, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # -- return --------------------------------------------------------------------------------

    async def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        if not self._owns(item):
            return
        driver, conn = self.reservoir.recipe.driver, item.conn
        doubt, settled = error, False
        try:
            if driver.is_broken(conn) or driver.interrupted(error):
                return
            if error is None:
                await awaited(driver.commit(conn))
            else:
                await awaited(driver.rollback(conn))
            settled = True
        except BaseException as failure:
            doubt = failure
            if error is None or not isinstance(failure, Exception):
                raise
            log.warning("%s: rollback failed: %s", self.name, describe(failure))
        finally:
            await self._release(item, settled=settled, doubt=doubt)

    async def _release(
        self, item: Item[C], *, settled: bool = False, doubt: BaseException | None = None
    ) -> None:
        """Give back a connection, made clean first.

        :param settled: whether its transaction was ended just now.
        :param doubt: an error after which it may be of no use.
        """
        try:
            clean = await self._clean(item, settled, doubt)
        except BaseException:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            raise
        if not clean:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            return
        self.reservoir.carry_out(self._core.give(item, self._monotonic()))

    async def _clean(self, item: Item[C], settled: bool, doubt: BaseException | None) -> bool:
        driver, conn = self.reservoir.recipe.driver, item.conn
        if driver.interrupted(doubt):
            log.warning("%s: closing a connection that was interrupted", self.name)
            return False
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
            self._tell_unclean(state)
            return False
        if doubt is not None and driver.suspects(conn, doubt):
            try:
                await awaited(driver.ping(conn, PING_TIMEOUT))
            except Exception as error:
                log.warning("%s: closing a lost connection: %s", self.name, describe(error))
                return False
        if self._reset is not None:
            try:
                await awaited(self._reset(conn))
            except Exception as error:
                log.warning("%s: the reset callback failed: %s", self.name, describe(error))
                return False
            state = self._state_of(conn, settled=True)
            if state is not State.IDLE:
                self._warn_reset(state)
                return False
        return True


class _Checkout(Generic[C]):
    """The block of `connection()`. The usual case, in which one is ready and comes back clean, does
    as little as it can.

    So it has no `__init__`, which `connection()` does instead, and what it calls is put into a
    local variable first: each of the two saves a tenth of the time.
    """

    __slots__ = ("_item", "_pool", "_timeout")

    _item: Item[C]
    _pool: AsyncConnectionPool[C]
    _timeout: float | None

    # What they return is typed as `AsyncExitStack` wants it; it is awaited, and nothing else.

    def __aenter__(self) -> Coroutine[Any, Any, C]:
        pool = self._pool
        take, monotonic = pool._take, pool._monotonic
        item = take(monotonic())
        if item is None:
            return self._wait()
        item.holder = _task_of(pool._loop)
        self._item = item
        at_hand: Coroutine[Any, Any, C] = item.at_hand
        return at_hand

    async def _wait(self) -> C:
        self._item = item = await self._pool._checkout(self._timeout)
        return item.conn

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Coroutine[Any, Any, None]:
        item, pool = self._item, self._pool
        is_clean = pool._is_clean
        if error is None and is_clean(item.conn):
            give, monotonic = pool._give, pool._monotonic
            waiter = give(item, monotonic())
            if waiter is not None or pool._retired:
                pool.reservoir.carry_out(waiter)
            nothing: Coroutine[Any, Any, None] = pool._nothing
            return nothing
        return pool._finish(item, error)
