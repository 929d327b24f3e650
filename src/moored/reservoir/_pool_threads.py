"""The pool for threads: the same decisions, with a lock around them."""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from moored.kernel import LoopThread

from ._at_once import at_once
from ._core import Waiter
from ._errors import PoolTimeout
from ._item import Item
from ._pool import PING_TIMEOUT, Pool
from ._psycopg import driver
from ._types import ThreadsC as C

__all__ = ["ConnectionPool"]

P = ParamSpec("P")
T = TypeVar("T")


class _ThreadWaiter(Waiter[C]):
    """A thread that waits: for a lock that whoever serves it lets go."""

    __slots__ = ("_gate",)

    def __init__(self, since: float, deadline: float, holder: Any) -> None:
        super().__init__(since, deadline, holder)
        self._gate = allocate_lock()
        self._gate.acquire()

    def wait(self, seconds: float) -> None:
        """Until it is woken, or the time is over."""
        self._gate.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self._gate.release()


class ConnectionPool(Pool[C]):
    """A pool for threads whose connections are ready before they are needed.

    `with pool.connection() as conn` gives the driver's own connection; at the end its transaction
    is committed, or rolled back if the block raised. All parameters of psycopg_pool are taken; the
    new ones are those of `AsyncConnectionPool`.

    A pool that was opened before a fork is a new and empty one in the child, filled at first use.
    """

    _asynchronous = False

    def _set_up(self) -> None:
        if self._opens_itself:
            self.open()

    # -- life ----------------------------------------------------------------------------------

    def open(
        self,
        wait: bool = False,
        timeout: float = 30.0,
        progress: Callable[[str], object] | None = None,
    ) -> None:
        """Begin to fill; with `wait`, until the low watermark is reached.

        When that takes longer than the timeout, the pool is open all the same, with a warning:
        whoever wants an error instead calls `wait()`.
        """
        LoopThread.shared().run(self._fill(wait, timeout, progress))
        self._opens_itself = True  # in a forked child, too

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until all connections that are to be kept are there; else `PoolTimeout`, and the
        pool is closed."""
        self._check_open()
        try:
            LoopThread.shared().run(self._fill_up(timeout))
        except PoolTimeout:
            self.close()
            raise

    def close(self, timeout: float = 5.0) -> None:
        """Hand out nothing more, tell those who wait, and close all connections.

        Those in use are closed when they come back. What does not close in time is left alone.
        """
        if self.reservoir.state == "open":
            LoopThread.shared().run(self.reservoir.stop(timeout))
        else:
            self.reservoir.state = "closed"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use -----------------------------------------------------------------------------------

    def connection(self, timeout: float | None = None) -> _Checkout[C]:
        """`with pool.connection() as conn`: a connection, and the end of its transaction."""
        checkout: _Checkout[C] = _MethodCheckout() if self._by_methods else _Checkout()
        checkout._pool = self
        checkout._timeout = timeout
        return checkout

    def getconn(self, timeout: float | None = None) -> C:
        """A connection, to be given back with `putconn()`; better use `connection()`."""
        return self._by_hand(self._checkout(timeout))

    def putconn(self, conn: C) -> None:
        """Give back what `getconn()` gave; an open transaction is rolled back, with a warning."""
        at_once(self._release(self._item_of(conn)))

    def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Keep so many connections from now on, and at most so many."""
        self._resize(min_size, max_size)

    def check(self) -> None:
        """Ask every ready connection for a sign of life, and replace those that give none."""
        at_once(self._check_all())

    def drain(self) -> None:
        """Replace all connections: the ready ones now, those in use when they come back."""
        self._drain()

    @staticmethod
    def check_connection(conn: Any) -> None:
        """Ask a psycopg connection for a sign of life: a `check` for every checkout."""
        driver(None, asynchronous=False).ping(conn, PING_TIMEOUT)

    # -- checkout ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        # In a forked child it begins anew, with connections of its own.
        if self.reservoir.state == "new" and self._opens_itself:
            self.open()
        self.reservoir.check_open()

    def _checkout(self, timeout: float | None) -> Item[C]:
        """A connection that was looked at, after waiting for it if need be."""
        self._check_open()
        return at_once(self._obtain(timeout, get_ident()))

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (there is no loop: see `at_once`)

    async def _wait(
        self, now: float, began: float, timeout: float, holder: Any, patient: bool
    ) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        waiter: _ThreadWaiter[C] = _ThreadWaiter(now, began + timeout, holder)
        with reservoir.lock:
            # Between the last look and this lock one may have come back.
            item = core.take(now) or core.search(now)
            if item is None and not core.open:
                reservoir.check_open()  # it was closed meanwhile: nobody would ever wake this one
            why = None if item is not None else core.refuses(now, patient=patient)
            error = None if item is not None else reservoir.upkeep.unreachable()
            if item is None and why is None and error is None:
                core.enqueue(waiter)
        if item is not None:
            reservoir.mark(item, holder)
            return item
        if why is not None:
            raise self._refused(why)
        if error is not None:
            raise error
        item = self._wait_for(waiter, timeout)
        reservoir.latency.add(self._monotonic() - began)
        reservoir.mark(item, holder)
        return item

    def _wait_for(self, waiter: _ThreadWaiter[C], timeout: float) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        try:
            if core.can_grow:
                reservoir.upkeep.nudge()
            waiter.wait(waiter.deadline - self._monotonic())
        except BaseException:
            # Interrupted (Ctrl-C): what it got meanwhile goes back.
            with reservoir.lock:
                now = self._monotonic()
                got = core.leave(waiter, now)
                next_one = None if got is None else core.give(got, now)
            reservoir.carry_out(next_one)
            raise
        with reservoir.lock:
            if not waiter.settled:
                core.leave(waiter, self._monotonic())
                core.timeouts += 1
        if waiter.item is not None:
            return waiter.item
        raise waiter.error or self._timed_out(timeout)

    # -- return --------------------------------------------------------------------------------

    def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        if self._owns(item):
            at_once(self._settle(item, error))


class _Checkout(Generic[C]):
    """The block of `connection()`. The usual case, in which one is ready and comes back clean, does
    as little as it can, as in the pool for asyncio."""

    __slots__ = ("_item", "_pool", "_timeout")

    _item: Item[C]
    _pool: ConnectionPool[C]
    _timeout: float | None

    def __enter__(self) -> C:
        pool = self._pool
        take, monotonic = pool._take, pool._monotonic
        with pool._lock:
            item = take(monotonic())
        if item is None:
            item = pool._checkout(self._timeout)
        else:
            item.holder = get_ident()
        self._item = item
        return item.conn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        item, pool = self._item, self._pool
        is_clean = pool._is_clean
        if error is None and is_clean(item.conn):
            give, monotonic = pool._give, pool._monotonic
            with pool._lock:
                waiter = give(item, monotonic())
            if waiter is not None or pool._retired:
                pool.reservoir.carry_out(waiter)
            return
        pool._finish(item, error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """As a decorator: each call of the function has a connection of its own."""

        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._pool.connection(self._timeout):
                return function(*args, **kwargs)

        return within


class _MethodCheckout(_Checkout[C]):
    """The block of a pool whose class has a `getconn` or a `putconn` of its own."""

    __slots__ = ("_conn",)

    def __enter__(self) -> C:
        self._conn = self._pool.getconn(self._timeout)
        return self._conn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            at_once(self._pool._end_transaction(self._conn, error))
        finally:
            self._pool.putconn(self._conn)
