"""The pool for threads: it holds a lock around each decision of the core."""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from moored.kernel import LoopThread, run_callback

from ._core import Waiter
from ._driver import PING_TIMEOUT
from ._errors import PoolTimeout
from ._item import Item
from ._pool import Pool
from ._psycopg import driver
from ._run_sync import run_sync
from ._types import ThreadsC as C

__all__ = ["ConnectionPool"]

P = ParamSpec("P")
T = TypeVar("T")

#: How long to wait for a lock that others hold for microseconds, before concluding that this thread
#: holds it (the garbage collector may run while it does).
PATIENCE = 0.2


class _ThreadWaiter(Waiter[C]):
    """A waiting thread, blocked on a lock that `wake` releases."""

    __slots__ = ("_gate",)

    def __init__(self, since: float, deadline: float, holder: Any) -> None:
        super().__init__(since, deadline, holder)
        self._gate = allocate_lock()
        self._gate.acquire()

    def wait(self, seconds: float) -> None:
        """Block until the waiter is woken, for this many seconds at most."""
        self._gate.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self._gate.release()


class ConnectionPool(Pool[C]):
    """A pool for threads that opens its connections before they are needed.

    `with pool.connection() as conn` gives the driver's own connection; at the end of the block its
    transaction is committed, or rolled back if the block raised. All parameters of psycopg_pool are
    accepted; the additional ones are those of `AsyncConnectionPool`.

    In a forked child process, an open pool is empty and opens its own connections at first use.
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
        """Start opening connections; with `wait`, wait until the low watermark is reached.

        If that takes longer than the timeout, the pool logs a warning and stays open; call
        `wait()` to get an error instead.

        :param progress: called once a second while waiting, with a description of the progress.
        """
        LoopThread.shared().run(self._fill(wait, timeout, progress))
        self._opens_itself = True  # also in a forked child

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until the pool has `min_size` connections.

        After the timeout, close the pool and raise `PoolTimeout`.
        """
        self._check_open()
        try:
            LoopThread.shared().run(self._fill_up(timeout))
        except PoolTimeout:
            self.close()
            raise

    def close(self, timeout: float = 5.0) -> None:
        """Close the pool: waiting callers get `PoolClosed`, and ready connections are closed.

        Connections in use are closed when they are returned. After the timeout, connections that
        are still closing are no longer waited for.
        """
        if self.reservoir.state == "new":
            self.reservoir.state = "closed"
        else:
            LoopThread.shared().run(self.reservoir.stop(timeout))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use -----------------------------------------------------------------------------------

    def connection(self, timeout: float | None = None) -> _Checkout[C]:
        """Return a context manager that checks out a connection.

        At the end of the block, the transaction is committed (or rolled back if the block raised)
        and the connection is returned to the pool.
        """
        checkout: _Checkout[C] = _MethodCheckout() if self._by_methods else _Checkout()
        checkout._pool = self
        checkout._timeout = timeout
        return checkout

    def getconn(self, timeout: float | None = None) -> C:
        """Check out a connection, to be returned with `putconn()`; prefer `connection()`."""
        return self._hand_out(self._checkout(timeout))

    def putconn(self, conn: C) -> None:
        """Return a connection of `getconn()`; an open transaction is rolled back with a warning."""
        if not self._postponed(ConnectionPool.putconn, self, conn):
            run_sync(self._returns.release(self._item_of(conn)))

    def _resolve_conninfo(self) -> str:
        given: Any = self.conninfo
        return (given() if callable(given) else given) or ""

    def _resolve_kwargs(self) -> dict[str, Any]:
        given: Any = self.kwargs
        return (given() if callable(given) else given) or {}

    def resize(self, min_size: int, max_size: int | None = None) -> None:
        """Change the number of connections to keep, and the maximum."""
        self._resize(min_size, max_size)

    def check(self) -> None:
        """Ping every ready connection, and replace those that do not answer."""
        self._check_process()
        LoopThread.shared().run(self.reservoir.upkeep.ping_all(PING_TIMEOUT))

    def drain(self) -> None:
        """Replace all connections: ready ones now, those in use when they are returned."""
        self._drain()

    @staticmethod
    def check_connection(conn: Any) -> None:
        """Ping a psycopg connection; pass this as `check` to ping at every checkout."""
        driver(None, asynchronous=False).ping(conn, PING_TIMEOUT)

    # -- checkout ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        # In a forked child the state is "new": the pool opens its own connections there.
        if self.reservoir.state == "new" and self._opens_itself:
            self.open()
        self.reservoir.check_open()

    def _checkout(self, timeout: float | None) -> Item[C]:
        """Return a checked connection, after waiting for it if need be."""
        self._check_open()
        return run_sync(self._obtain(timeout, get_ident()))

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (there is no loop: see `run_sync`)

    def _new_waiter(self, since: float, deadline: float, holder: Any) -> Waiter[C]:
        return _ThreadWaiter(since, deadline, holder)

    async def _until_woken(self, waiter: Waiter[C]) -> None:
        assert isinstance(waiter, _ThreadWaiter)
        waiter.wait(waiter.deadline - self._monotonic())

    # -- return --------------------------------------------------------------------------------

    def _finish(self, item: Item[C], error: BaseException | None) -> None:
        """End a block: commit, or roll back after an error, and return the connection."""
        if self._owns(item) and not self._postponed(self._finish, item, error):
            run_sync(self._returns.settle(item, error))

    def _postponed(self, call: Callable[..., None], *args: Any) -> bool:
        """Whether this thread holds the lock; if so, make this call in another thread instead.

        The garbage collector may end a checkout in the middle of the pool's own code.
        """
        if self._lock.acquire(False) or self._lock.acquire(timeout=PATIENCE):
            self._lock.release()
            return False
        LoopThread.shared().spawn(run_callback(call, *args), name=f"{self.name}-return")
        return True


class _Checkout(Generic[C]):
    """The context manager of `connection()`, written for speed like that of the asyncio pool."""

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
        """Decorate a function so that each call runs inside `connection()`."""

        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._pool.connection(self._timeout):
                return function(*args, **kwargs)

        return within


class _MethodCheckout(_Checkout[C]):
    """The context manager of a pool whose class overrides `getconn` or `putconn`."""

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
            run_sync(self._pool._returns.end_transaction(self._conn, error))
        finally:
            self._pool.putconn(self._conn)
