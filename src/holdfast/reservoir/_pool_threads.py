"""The pool for threads: the same decisions, with a lock around them."""

from __future__ import annotations

import logging
import threading
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from holdfast.kernel import LoopThread, describe

from ._core import Waiter
from ._driver import State
from ._errors import PoolTimeout
from ._item import Item
from ._pool import PING_TIMEOUT, Pool

__all__ = ["ConnectionPool"]

log = logging.getLogger("holdfast.reservoir")

C = TypeVar("C")


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
        if self.reservoir.state != "open":
            LoopThread.shared().run(self.reservoir.start())
        if wait:
            number = max(1, self._core.watermark)
            if not self._wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until all connections that are to be kept are there; else `PoolTimeout`, and the
        pool is closed."""
        self._check_open()
        number = self._core.target
        if not self._wait_ready(number, timeout, None):
            text = self._not_full(number, timeout)
            self.close()
            raise PoolTimeout(text)

    def _wait_ready(
        self, number: int, timeout: float, progress: Callable[[str], object] | None
    ) -> bool:
        return LoopThread.shared().run(self.reservoir.wait_ready(number, timeout, progress))

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- use -----------------------------------------------------------------------------------

    def connection(self, timeout: float | None = None) -> _Checkout[C]:
        """`with pool.connection() as conn`: a connection, and the end of its transaction."""
        return _Checkout(self, timeout)

    def getconn(self, timeout: float | None = None) -> C:
        """A connection, to be given back with `putconn()`; better use `connection()`."""
        return self._checkout(timeout).conn

    def putconn(self, conn: C) -> None:
        """Give back what `getconn()` gave; an open transaction is rolled back, with a warning."""
        self._release(self._item_of(conn))

    def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Keep so many connections from now on, and at most so many."""
        self._resize(min_size, max_size)

    def check(self) -> None:
        """Ask every ready connection for a sign of life, and replace those that give none."""
        with self.reservoir.lock:
            ready = list(self._core.ready)
        for item in ready:
            with self.reservoir.lock:
                picked = self._core.pick(item, self._monotonic())
            if picked and self._is_fit(item, always=True):
                with self.reservoir.lock:
                    waiter = self._core.put(item, self._monotonic())
                self.reservoir.carry_out(waiter)

    def drain(self) -> None:
        """Replace all connections: the ready ones now, those in use when they come back."""
        with self.reservoir.lock:
            self._core.drain()
        self.reservoir.carry_out(None)

    # -- checkout ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        # In a forked child it begins anew, with connections of its own.
        if self.reservoir.state == "new" and self._opens_itself:
            self.open()
        self.reservoir.check_open()

    def _checkout(self, timeout: float | None) -> Item[C]:
        """A connection that was looked at, after waiting for it if need be."""
        self._check_open()
        holder = get_ident()
        timeout = self.timeout if timeout is None else timeout
        began = self._monotonic()
        while True:
            item = self.reservoir.obtain(self._monotonic(), holder)
            if item is None:
                item = self._wait(began, began + timeout, timeout, holder)
            if self._is_fit(item):
                return item

    def _wait(self, began: float, deadline: float, timeout: float, holder: Any) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        now = self._monotonic()
        waiter: _ThreadWaiter[C] = _ThreadWaiter(now, deadline, holder)
        with reservoir.lock:
            # Between the last look and this lock one may have come back.
            item = core.take(now) or core.search(now)
            why = None if item is not None else core.refuses(now)
            if item is None and why is None:
                core.enqueue(waiter)
        if item is not None:
            reservoir.mark(item, holder)
            return item
        if why is not None:
            raise self._refused(why)
        reservoir.works.nudge()
        item = self._wait_for(waiter, timeout)
        reservoir.latency.add(self._monotonic() - began)
        reservoir.mark(item, holder)
        return item

    def _wait_for(self, waiter: _ThreadWaiter[C], timeout: float) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        try:
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

    def _is_fit(self, item: Item[C], *, always: bool = False) -> bool:
        """Whether it can be handed out; if not, it is let go."""
        if self._check is None and not always and not self._must_ping(item):
            return True
        try:
            if self._check is not None:
                self._check(item.conn)
            else:
                self.reservoir.recipe.driver.ping(item.conn, PING_TIMEOUT)
        except BaseException as error:
            self._failed_check(item, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # -- return --------------------------------------------------------------------------------

    def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        driver, conn = self.reservoir.recipe.driver, item.conn
        try:
            if driver.is_broken(conn):
                return
            if error is None:
                driver.commit(conn)
                return
            if driver.suspects(conn, error):
                driver.ping(conn, PING_TIMEOUT)
            driver.rollback(conn)
        except Exception as failure:
            if error is None:
                raise
            log.warning("%s: rollback failed: %s", self.name, describe(failure))
        finally:
            self._release(item, settled=True)

    def _release(self, item: Item[C], *, settled: bool = False) -> None:
        """Give back a connection, made clean first."""
        try:
            clean = self._clean(item, settled)
        except BaseException:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            raise
        if not clean:
            self._returns_bad += 1
            self.reservoir.discard(item.conn, "bad")
            return
        with self.reservoir.lock:
            waiter = self._core.give(item, self._monotonic())
        self.reservoir.carry_out(waiter)

    def _clean(self, item: Item[C], settled: bool) -> bool:
        driver, conn = self.reservoir.recipe.driver, item.conn
        state = self._state_of(conn, settled)
        if state is State.TRANSACTION:
            self._warn_open_transaction(conn)
            try:
                driver.rollback(conn)
            except Exception as error:
                log.warning("%s: rollback failed: %s", self.name, describe(error))
                return False
            state = self._state_of(conn, settled=True)
        if state is not State.IDLE:
            log.warning("%s: closing a connection that came back %s", self.name, state.value)
            return False
        if self._reset is not None:
            try:
                self._reset(conn)
            except Exception as error:
                log.warning("%s: the reset callback failed: %s", self.name, describe(error))
                return False
            return self._state_of(conn, settled=True) is State.IDLE
        return True


class _Checkout(Generic[C]):
    """The block of `connection()`. The usual case, in which one is ready and comes back clean, does
    as little as it can."""

    __slots__ = ("_item", "_pool", "_timeout")

    def __init__(self, pool: ConnectionPool[C], timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout

    def __enter__(self) -> C:
        pool = self._pool
        with pool._lock:
            item = pool._take(pool._monotonic())
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
        if error is None and pool._is_clean(item.conn):
            with pool._lock:
                waiter = pool._give(item, pool._monotonic())
            if waiter is not None or pool._retired:
                pool.reservoir.carry_out(waiter)
            return
        pool._finish(item, error)
