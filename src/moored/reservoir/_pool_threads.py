"""The pool for threads: the same decisions, with a lock around them."""

from __future__ import annotations

import logging
import math
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self

from moored.kernel import LoopThread, describe

from ._core import Waiter
from ._driver import State
from ._errors import PoolTimeout
from ._item import Item
from ._pool import PING_TIMEOUT, Pool
from ._psycopg import driver
from ._types import ThreadsC as C

__all__ = ["ConnectionPool"]

log = logging.getLogger("moored.reservoir")


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
            LoopThread.shared().run(self._start())
            self._opens_itself = True  # in a forked child, too
        if wait:
            number = self._number_to_start_with()
            if not self._wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    async def _start(self) -> None:
        # Looked at on the loop: of many threads that open it, one does.
        if self.reservoir.state != "open":
            await self.reservoir.start()

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
        checkout: _Checkout[C] = _Checkout()
        checkout._pool = self
        checkout._timeout = timeout
        return checkout

    def getconn(self, timeout: float | None = None) -> C:
        """A connection, to be given back with `putconn()`; better use `connection()`."""
        return self._by_hand(self._checkout(timeout))

    def putconn(self, conn: C) -> None:
        """Give back what `getconn()` gave; an open transaction is rolled back, with a warning."""
        self._release(self._item_of(conn))

    def _return(self, conn: C) -> None:
        if (item := self._claim(conn)) is not None:
            self._release(item)

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
            if picked and self._is_fit(item, ping=True):
                with self.reservoir.lock:
                    waiter = self._core.put(item, self._monotonic())
                self.reservoir.carry_out(waiter)

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
        holder = get_ident()
        timeout = self.timeout if timeout is None else timeout
        began = self._monotonic()
        while True:
            item = self.reservoir.obtain(self._monotonic(), holder)
            if item is None:
                item = self._wait(began, began + timeout, timeout, holder)
            if not self._must_look(item):
                return item
            if self._is_fit(item, began + timeout):
                if not self._came_too_late(item):
                    return item
                self._unfit += 1
            else:
                self._unfit += 1
                self._suspect_others()
                time.sleep(self._pause(item, began, timeout))

    def _wait(self, began: float, deadline: float, timeout: float, holder: Any) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        now = self._monotonic()
        waiter: _ThreadWaiter[C] = _ThreadWaiter(now, deadline, holder)
        with reservoir.lock:
            # Between the last look and this lock one may have come back.
            item = core.take(now) or core.search(now)
            if item is None and not core.open:
                reservoir.check_open()  # it was closed meanwhile: nobody would ever wake this one
            why = None if item is not None else core.refuses(now)
            if item is None and why is None:
                core.enqueue(waiter)
        if item is not None:
            reservoir.mark(item, holder)
            return item
        if why is not None:
            raise self._refused(why)
        item = self._wait_for(waiter, timeout)
        reservoir.latency.add(self._monotonic() - began)
        reservoir.mark(item, holder)
        return item

    def _wait_for(self, waiter: _ThreadWaiter[C], timeout: float) -> Item[C]:
        core, reservoir = self._core, self.reservoir
        try:
            if core.can_grow:
                reservoir.works.nudge()
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

    def _is_fit(self, item: Item[C], deadline: float = math.inf, *, ping: bool = False) -> bool:
        """Whether it gives a sign of life before the deadline; if not, it is let go."""
        try:
            if self._check is not None and not ping:
                self._check(item.conn)
            else:
                self.reservoir.recipe.driver.ping(item.conn, self._patience(deadline))
        except BaseException as error:
            self._failed_check(item, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # -- return --------------------------------------------------------------------------------

    def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        if not self._owns(item):
            return
        driver, conn = self.reservoir.recipe.driver, item.conn
        doubt, settled = error, False
        try:
            if driver.is_broken(conn) or driver.interrupted(error):
                return
            if error is None:
                driver.commit(conn)
            else:
                driver.rollback(conn)
            settled = True
        except BaseException as failure:
            doubt = failure
            if error is None or not isinstance(failure, Exception):
                raise
            log.warning("%s: rollback failed: %s", self.name, describe(failure))
        finally:
            self._release(item, settled=settled, doubt=doubt)

    def _release(
        self, item: Item[C], *, settled: bool = False, doubt: BaseException | None = None
    ) -> None:
        """Give back a connection, made clean first.

        :param settled: whether its transaction was ended just now.
        :param doubt: an error after which it may be of no use.
        """
        try:
            clean = self._clean(item, settled, doubt)
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

    def _clean(self, item: Item[C], settled: bool, doubt: BaseException | None) -> bool:
        driver, conn = self.reservoir.recipe.driver, item.conn
        if driver.interrupted(doubt):
            log.warning("%s: closing a connection that was interrupted", self.name)
            return False
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
            self._tell_unclean(state)
            return False
        if doubt is not None and driver.suspects(conn, doubt):
            try:
                driver.ping(conn, PING_TIMEOUT)
            except Exception as error:
                log.warning("%s: closing a lost connection: %s", self.name, describe(error))
                return False
        if self._reset is not None:
            try:
                self._reset(conn)
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
