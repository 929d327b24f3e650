"""The pool for asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from moored.kernel import LoopThread, Timers, awaited, describe

from ._core import Waiter
from ._driver import PING_TIMEOUT, DriverState
from ._errors import PoolClosed, PoolTimeout, ReservoirError
from ._item import Item, Place
from ._pool import Pool
from ._psycopg import driver
from ._types import AsyncC as C

__all__ = ["AsyncConnectionPool"]

log = logging.getLogger("moored.reservoir")

#: How often a caller on another loop looks whether the pool's loop has ended.
LOOK = 1.0

P = ParamSpec("P")
T = TypeVar("T")

# Each checkout stores its task. `current_task` of Python 3.11 would double the time of a checkout.
# No later version has to have the private name, which its own `current_task` uses.
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
    """A pool for asyncio that opens its connections before they are needed.

    `async with pool.connection() as conn` gives the driver's own connection; at the end of the
    block its transaction is committed, or rolled back if the block raised. All parameters of
    psycopg_pool are accepted; these are new:

    :param config: all settings of the reservoir, for example from `ReservoirConfig.from_env`.
    :param creation_rate: how many connections may be opened per second (100).
    :param creation_burst: how many connections may be opened at once.
    :param tokens: returns passwords that expire, for example `aws.DsqlTokens(…)`.
    :param leases: the URL of a lease store, or a client; limits the connections of the cluster.
    :param connect: another driver's connect function, for example `asyncpg.connect`; it is called
        with the conninfo, if there is one, and `kwargs`.
    :param reset: called when a connection is returned. asyncpg connections are reset by default,
        as by asyncpg's own pool, which takes a round trip; False leaves their sessions unchanged.
    :param is_broken: returns whether a connection is unusable, without a query to the server.
    :param ping: queries the server, and raises if it does not answer.
    :param close_connection: closes a connection.
    :param check_idle: a connection that was idle for this many seconds is pinged before it is
        handed out; None turns this off.
    :param leak_after: log a warning, with the stack of the checkout, when a connection is in use
        for this many seconds.
    :param queue_target: the longest acceptable wait in seconds for the fastest checkout of an
        interval; infinity accepts every caller, however slow the queue is.
    :param queue_interval: the length of that interval in seconds. After an interval in which every
        checkout waited longer than the target, new callers get `PoolOverloaded` immediately,
        unless they pass a timeout of their own.
    :param fail_fast: while the pool has no connection and the server cannot be reached, callers
        get `ServerUnreachable` immediately instead of waiting.
    :param endpoint: the server's name in leases, rate limits and metrics.
    :param service: the service's name in leases and metrics; by default the program's name.
    """

    _asynchronous = True

    def _set_up(self) -> None:
        # The loop that opens the connections and hands them out, also to callers on other loops.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._choosing = threading.Lock()
        self._timers = Timers(self.reservoir.clock)

    # -- life ----------------------------------------------------------------------------------

    async def open(
        self,
        wait: bool = False,
        timeout: float = 30.0,
        progress: Callable[[str], object] | None = None,
    ) -> None:
        """Start opening connections; with `wait`, wait until the low watermark is reached.

        If that takes longer than the timeout, the pool logs a warning and stays open; call
        `wait()` to get an error instead.

        :param progress: called once a second while waiting, with a description of the progress.
        """
        with self._choosing:
            if self.reservoir.state == "new" and (self._loop is None or self._loop.is_closed()):
                self._run_on(asyncio.get_running_loop())
        await self._at_home(self._fill(wait, timeout, progress))

    def _run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._nothing: Any = loop.create_future()
        self._nothing.set_result(None)

    async def wait(self, timeout: float = 30.0) -> None:
        """Wait until the pool has `min_size` connections.

        After the timeout, close the pool and raise `PoolTimeout`.
        """
        await self._get_usable()
        try:
            await self._at_home(self._fill_up(timeout))
        except PoolTimeout:
            await self.close()
            raise

    async def close(self, timeout: float = 5.0) -> None:
        """Close the pool: waiting callers get `PoolClosed`, and ready connections are closed.

        Connections in use are closed when they are returned. After the timeout, connections that
        are still closing are no longer waited for.
        """
        if self.reservoir.usable and self._loop is not asyncio.get_running_loop():
            if self._loop is None or self._loop.is_closed():
                self._abandon()
            elif self._loop.is_running():
                await self._at_home(self.close(timeout))
            else:
                raise RuntimeError(self._on_another_loop())
            return
        self._timers.cancel_all()
        await self.reservoir.stop(timeout)

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- use -----------------------------------------------------------------------------------

    def connection(self, timeout: float | None = None) -> _AsyncCheckout[C]:
        """Return a context manager that checks out a connection.

        At the end of the block, the transaction is committed (or rolled back if the block raised)
        and the connection is returned to the pool.
        """
        checkout: _AsyncCheckout[C]
        if self._by_methods:
            checkout = _AsyncMethodCheckout()
        elif self._loop is asyncio._get_running_loop():
            checkout = _AsyncCheckout()
        else:
            checkout = _DistantCheckout()
        checkout._pool = self
        checkout._timeout = timeout
        return checkout

    async def getconn(self, timeout: float | None = None) -> C:
        """Check out a connection, to be returned with `putconn()`; prefer `connection()`."""
        return self._hand_out(await self._checkout_anywhere(timeout))

    async def putconn(self, conn: C) -> None:
        """Return a connection of `getconn()`; an open transaction is rolled back with a warning."""
        await self._at_home(self._put(conn))

    async def _put(self, conn: C) -> None:
        await self._returns.release(self._item_of(conn))

    async def _resolve_conninfo(self) -> str:
        given: Any = self.conninfo
        return (await awaited(given()) if callable(given) else given) or ""

    async def _resolve_kwargs(self) -> dict[str, Any]:
        given: Any = self.kwargs
        return (await awaited(given()) if callable(given) else given) or {}

    async def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Change the number of connections to keep, and the maximum."""
        await self._at_home(_call(self._resize, min_size, max_size))

    async def check(self) -> None:
        """Ping every ready connection, and replace those that do not answer."""
        self._check_process()
        await self._at_home(self.reservoir.upkeep.ping_all(PING_TIMEOUT))

    async def drain(self) -> None:
        """Replace all connections: ready ones now, those in use when they are returned."""
        await self._at_home(_call(self._drain))

    @staticmethod
    async def check_connection(conn: Any) -> None:
        """Ping a psycopg connection; pass this as `check` to ping at every checkout."""
        await awaited(driver(None, asynchronous=True).ping(conn, PING_TIMEOUT))

    # -- checkout ------------------------------------------------------------------------------

    async def _checkout(self, timeout: float | None) -> Item[C]:
        """Return a checked connection, after waiting for it if need be."""
        try:
            if not self._usable:
                await self._get_usable()
            loop = asyncio.get_running_loop()
            if self._loop is not loop and not (self._rests and self._any_loop):
                raise PoolClosed(self._on_another_loop())
            return await self._obtain(timeout, _task_of(loop))
        except ReservoirError:
            await asyncio.sleep(0)  # a caller that retries at once must not stop the loop
            raise

    async def _checkout_anywhere(self, timeout: float | None) -> Item[C]:
        """Check out a connection from any event loop, after opening the pool if need be."""
        if self._opens_itself and self.reservoir.state == "new":
            await self.open()
        elif self._usable and self._loop is not None and self._loop.is_closed() and self._any_loop:
            await self._move()
        home = self._distant_home()
        if home is None or not self._any_loop:
            return await self._checkout(timeout)
        limit = (self.timeout if timeout is None else timeout) + PING_TIMEOUT
        try:
            async with asyncio.timeout(limit if limit < math.inf else None):
                return await self._checkout_at(home, timeout)
        except PoolTimeout:
            raise
        except TimeoutError:  # the pool's loop is blocked, or has ended
            raise self._timed_out(limit) from None

    async def _checkout_at(self, home: asyncio.AbstractEventLoop, timeout: float | None) -> Item[C]:
        """Check out a connection on the pool's loop, for a caller on another one."""
        answer: Future[Item[C]] = Future()

        async def serve() -> None:
            try:
                item = await self._checkout(timeout)
            except BaseException as error:
                cancelled = isinstance(error, asyncio.CancelledError)
                with suppress(InvalidStateError):
                    answer.set_exception(
                        PoolClosed(f"{self.name}: its event loop is ending") if cancelled else error
                    )
                return
            try:
                answer.set_result(item)
            except InvalidStateError:  # the caller was cancelled
                await self._returns.release(item)

        serving = asyncio.run_coroutine_threadsafe(serve(), home)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if not answer.cancel() and answer.exception() is None:
                back = self._returns.release(answer.result())
                asyncio.run_coroutine_threadsafe(back, home)
            else:
                serving.cancel()
            raise

    async def _at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this on the pool's loop; it continues there if the caller is cancelled."""
        home = self._distant_home()
        if home is None:
            return await work
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))
        while not future.done():
            await asyncio.wait([future], timeout=LOOK)
            if home.is_closed() and not future.done():
                future.cancel()
        if future.cancelled():
            raise PoolClosed(f"{self.name}: its event loop has ended meanwhile")
        return future.result()

    def _distant_home(self) -> asyncio.AbstractEventLoop | None:
        """The pool's loop if it runs in another thread of this process."""
        home = self._loop
        if home is None or self.reservoir.pid != os.getpid() or not home.is_running():
            return None
        return None if home is asyncio.get_running_loop() else home

    @property
    def _rests(self) -> bool:
        """Whether the pool's loop does not run now, but may later: others take what is ready."""
        return self._loop is not None and not (self._loop.is_running() or self._loop.is_closed())

    @property
    def _any_loop(self) -> bool:
        return self.reservoir.recipe.driver.any_loop

    async def _move(self) -> None:
        """Continue on the library's own loop, with new connections: the pool's loop has ended.

        Callers whose loops are short-lived, such as those of `async_to_sync`, then share one pool.
        """
        with self._choosing:
            if self._loop is not None and self._loop.is_closed():
                text = "%s: its event loop has ended: continuing in a thread, with new connections"
                log.warning(text, self.name)
                former = self.reservoir.core
                self._opens_itself = True
                self._maker = 0  # a connection of the former loop is not returned, but closed
                self._timers = Timers(self.reservoir.clock)
                self._run_on(LoopThread.shared().loop)
                self.reservoir.begin_again()
                self._drop(item for item in former.items.values() if item.place is Place.READY)
        await self.open()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _on_another_loop(self) -> str:
        assert self._loop is not None
        over = ", which has ended" if self._loop.is_closed() else ""
        return (
            f"{self.name} was opened on another event loop{over}, and its connections work only "
            "there: create a pool on each loop, and close it before the loop ends"
        )

    def _abandon(self) -> None:
        """Close the sockets of a pool whose event loop has ended."""
        log.warning(
            "%s: its event loop has ended, so its connections are dropped, and its leases expire "
            "by their TTL: close the pool (or dispose of its engine) before the loop ends",
            self.name,
        )
        reservoir = self.reservoir
        reservoir.state = "closed"
        reservoir.on_change_of_state()
        reservoir.core.close()
        self._drop([*reservoir.core.items.values(), *reservoir.core.retired])

    def _drop(self, items: Iterable[Item[C]]) -> None:
        for item in items:
            try:
                closing = self.reservoir.recipe.driver.close(item.conn)
            except RuntimeError:
                continue  # asyncpg needs the loop to close a connection
            if asyncio.iscoroutine(closing):
                closing.close()

    async def _get_usable(self) -> None:
        if self._opens_itself and self.reservoir.state == "new":
            await self.open()
        self.reservoir.check_open()

    def _new_waiter(self, since: float, deadline: float, holder: Any) -> Waiter[C]:
        assert self._loop is not None
        if self._loop is not asyncio.get_running_loop():
            raise PoolClosed(
                f"{self.name}: its event loop rests, and no connection is ready for another loop"
            )
        waiter: _AsyncWaiter[C] = _AsyncWaiter(since, deadline, holder)
        waiter.future = self._loop.create_future()
        return waiter

    def _until_woken(self, waiter: Waiter[C]) -> asyncio.Future[None]:
        assert isinstance(waiter, _AsyncWaiter)
        self._set_timer(waiter.deadline)
        return waiter.future

    def _set_timer(self, deadline: float) -> None:
        """Set the one timer of all waiters, which fires at the earliest deadline."""
        set_for = self._timers.at("deadline")
        if deadline < (math.inf if set_for is None else set_for):
            self._timers.set("deadline", deadline, self._on_time)

    def _on_time(self) -> None:
        for waiter in self._core.expire(self._monotonic()):
            waiter.wake()
        if self._core.waiting:
            self._set_timer(min(waiter.deadline for waiter in self._core.waiting))

    # -- return --------------------------------------------------------------------------------

    async def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """End a block: commit, or roll back after an error, and return the connection."""
        if not self._owns(item):
            if self.reservoir.pid == os.getpid():
                await awaited(self.reservoir.recipe.driver.close(item.conn))
            return
        if isinstance(error, asyncio.CancelledError):
            # anyio cancels every await in a cancelled scope, so this work runs in another task.
            await self.reservoir.upkeep.shielded(self._returns.settle(item, error))
        else:
            await self._returns.settle(item, error)

    async def _return(self, conn: C) -> None:
        await self._at_home(super()._return(conn))

    async def _interrupt(self, conn: C) -> None:
        """Cancel the running statement of a cancelled task, so that its connection can be kept."""
        driver = self.reservoir.recipe.driver
        if driver.state(conn) is DriverState.BUSY:
            try:
                await awaited(driver.interrupt(conn, PING_TIMEOUT))
            except Exception as error:
                log.warning("%s: cancelling a statement failed: %s", self.name, describe(error))


async def _call(function: Callable[..., None], *args: Any) -> None:
    function(*args)


class _AsyncCheckout(Generic[C]):
    """The context manager of `connection()`, with the fast paths of checkout and return.

    For speed it has no `__init__` (`connection()` sets the attributes), and bound methods are put
    into local variables before the call: each of the two saves a tenth of the time.
    """

    __slots__ = ("_item", "_pool", "_timeout")

    _item: Item[C]
    _pool: AsyncConnectionPool[C]
    _timeout: float | None

    # The methods return futures, typed as coroutines because `AsyncExitStack` requires it.

    def __aenter__(self) -> Coroutine[Any, Any, C]:
        pool = self._pool
        take, monotonic = pool._take, pool._monotonic
        # On another event loop there is no task of the pool's loop, and `_checkout` raises. To
        # compare the running loop instead would make a checkout a tenth slower (Python 3.11).
        holder = _task_of(pool._loop)
        item = None if holder is None else take(monotonic())
        if item is None:
            return self._wait()
        item.holder = holder
        self._item = item
        ready_future: Coroutine[Any, Any, C] = item.ready_future
        return ready_future

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

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Decorate a function so that each call runs inside `connection()`."""

        @wraps(function)
        async def within(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self._pool.connection(self._timeout):
                return await function(*args, **kwargs)

        return within


class _DistantCheckout(_AsyncCheckout[C]):
    """The context manager on another event loop than the pool's, and before the pool is open."""

    __slots__ = ()

    def __aenter__(self) -> Coroutine[Any, Any, C]:
        return self._wait()

    async def _wait(self) -> C:
        self._item = item = await self._pool._checkout_anywhere(self._timeout)
        return item.conn

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool._at_home(self._pool._finish(self._item, error))


class _AsyncMethodCheckout(_AsyncCheckout[C]):
    """The context manager of a pool whose class overrides `getconn` or `putconn`."""

    __slots__ = ("_conn",)

    async def __aenter__(self) -> C:
        self._conn = await self._pool.getconn(self._timeout)
        return self._conn

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._pool._returns.end_transaction(self._conn, error)
        finally:
            await self._pool.putconn(self._conn)
