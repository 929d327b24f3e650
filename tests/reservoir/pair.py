"""Two pools that run the same operations: psycopg_pool's, which is the oracle, and ours.

A `Side` is one pool with its own table and with the connections that it has handed out; a `Pair`
runs each operation on both sides and asserts that the outcomes are equal.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psycopg
import psycopg_pool
from psycopg import pq, sql

from moored import reservoir

__all__ = ["Interrupted", "Moods", "Pair", "Plan", "Side", "family"]

T = TypeVar("T")
Connection = psycopg.Connection[Any]
Work = Callable[[Connection], object]

#: psycopg_pool's names of our errors, where they differ.
_NAMES = {"PoolOverloaded": "TooManyRequests"}
#: The loggers of the two pools.
LOGGERS = ("psycopg.pool", "moored.reservoir")
#: Timeouts of checkouts that are expected to succeed, and to fail.
PATIENCE = 10.0
SHORT = 0.03

_numbers = itertools.count(1)


class Interrupted(BaseException):
    """Stands for Ctrl-C: a `BaseException` that is not an `Exception`."""


def family(error: BaseException) -> str:
    """The name of an error's class in psycopg_pool."""
    name = type(error).__name__
    return _NAMES.get(name, name)


def outcome(call: Callable[[], object]) -> object:
    """The result of a call, or the error that it raised."""
    try:
        return call()
    except (Exception, Interrupted) as error:
        return f"raised {family(error)}"


class Moods:
    """What each callback does next: nothing (`good`), `raise`, or leave a `transaction` open."""

    def __init__(self) -> None:
        self.configure = self.reset = self.check = "good"

    def callback(self, which: str) -> Work:
        """Return the callback with this name."""

        def call(conn: Connection) -> None:
            mood = getattr(self, which)
            setattr(self, which, "good")
            if mood == "raise":
                raise RuntimeError(f"{which} is in a bad mood")
            if mood == "transaction":
                conn.execute("select 1")

        return call


class Plan:
    """The parameters of both pools."""

    def __init__(
        self,
        url: str,
        *,
        min_size: int,
        max_size: int,
        close_returns: bool = False,
        callbacks: frozenset[str] = frozenset(),
        callable_conninfo: bool = False,
        callable_kwargs: bool = False,
    ) -> None:
        self.url = url
        self.min_size = min_size
        self.max_size = max_size
        self.close_returns = close_returns
        self.callbacks = callbacks
        self.callable_conninfo = callable_conninfo
        self.callable_kwargs = callable_kwargs

    def arguments(self, moods: Moods, table: str) -> tuple[Any, dict[str, Any]]:
        """The conninfo and the parameters of one side."""
        options: Mapping[str, Any] = {
            "application_name": table,
            "options": "-c synchronous_commit=off",
        }
        conninfo: Any = self.url
        if self.callable_conninfo:
            conninfo = lambda: self.url  # noqa: E731
        return conninfo, {
            "kwargs": (lambda: options) if self.callable_kwargs else options,
            "min_size": self.min_size,
            "max_size": self.max_size,
            "max_waiting": 1,
            "open": True,
            "num_workers": 2,
            "close_returns": self.close_returns,
            **{name: moods.callback(name) for name in sorted(self.callbacks)},
        }


class Warnings(logging.Handler):
    """Counts the warnings about transactions that were left open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().count("rolling back")


class Side:
    """One pool, its table, and the connections that it has handed out."""

    #: The state of a connection that was just checked out.
    fresh = ("idle", "open")

    def __init__(self, pool: Any, table: str, moods: Moods, observer: Connection) -> None:
        self.pool = pool
        self.table = table
        self.moods = moods
        self.observer = observer
        self.out: list[Connection] = []
        #: The outcome of a checkout in another thread.
        self.found: object = None
        #: Errors that were raised and are not in the pool's statistics.
        self.not_counted = 0
        self.warnings = Warnings()
        self._dead: set[int] = set()
        self._pipelines: dict[Connection, Any] = {}
        self._kept: list[Any] = []

    # -- connections ---------------------------------------------------------------------------

    def take(self, timeout: float) -> object:
        """Call `getconn`; return the state of the connection."""
        conn = self.pool.getconn(timeout=timeout)
        self.out.append(conn)
        return self.welcome(conn)

    def wait_for_one(self, timeout: float) -> None:
        """Call `take` in a thread, and store its outcome in `found`."""
        self.found = outcome(lambda: self.take(timeout))

    def put(self, which: int) -> None:
        """Call `putconn`."""
        self.pool.putconn(self.out.pop(which % len(self.out)))

    def welcome(self, conn: Connection) -> object:
        """Return the state of a new checkout; undo what neither pool resets."""
        assert conn.info.backend_pid not in self._dead, f"{self.table}: a dead connection"
        state = self.state(conn)
        if conn in self._pipelines:
            self._pipelines.pop(conn).__exit__(None, None, None)
        conn.autocommit = False
        return state

    def state(self, conn: Connection) -> object:
        """The transaction status of a connection, and whether it is open."""
        status = pq.TransactionStatus(conn.pgconn.transaction_status)
        return status.name.lower(), "closed" if conn.closed else "open"

    def insert(self, conn: Connection, value: int) -> None:
        """Write a row."""
        query = sql.SQL("insert into {} values (%s)").format(sql.Identifier(self.table))
        conn.execute(query, [value])

    def rows(self) -> list[int]:
        """The committed rows."""
        query = sql.SQL("select n from {} order by n").format(sql.Identifier(self.table))
        return [row[0] for row in self.observer.execute(query)]

    def enter_pipeline(self, conn: Connection) -> None:
        """Begin a pipeline that its caller does not end."""
        self._pipelines[conn] = conn.pipeline()
        self._pipelines[conn].__enter__()

    def keep(self, thing: T) -> T:
        """Keep an object that a caller left open alive: its destructor would close it."""
        self._kept.append(thing)
        return thing

    def clear(self) -> None:
        """Close everything that is still open; the pool itself is closed."""
        for thing in (*self._kept, *self.out):
            if isinstance(thing, psycopg.Connection):
                thing._pool = None
            with contextlib.suppress(psycopg.Error, AttributeError):
                thing.close()

    # -- the server ----------------------------------------------------------------------------

    def terminate(self, conn: Connection) -> None:
        """Terminate the backend of a connection, and wait for its end."""
        self._end(conn.info.backend_pid)

    def terminate_idle(self) -> None:
        """Terminate the backends of idle connections."""
        used = {conn.info.backend_pid for conn in self.out if not conn.closed}
        query = "select pid from pg_stat_activity where application_name = %s"
        for (pid,) in self.observer.execute(query, [self.table]).fetchall():
            if pid not in used:
                self._end(pid)

    def _end(self, pid: int) -> None:
        self._dead.add(pid)
        self.observer.execute("select pg_terminate_backend(%s, 5000)", [pid])

    # -- numbers -------------------------------------------------------------------------------

    def settle(self) -> dict[str, int]:
        """Wait until no background work is in progress; return the pool's statistics."""
        ends = time.monotonic() + PATIENCE
        while True:
            stats: dict[str, int] = self.pool.get_stats()
            in_use = stats["pool_size"] - stats["pool_available"]
            if in_use == len(self.out) and stats["pool_size"] >= stats["pool_min"]:
                break
            assert time.monotonic() < ends, f"{self.table} does not settle: {stats}"
            time.sleep(0.001)
        stats["warnings"] = self.warnings.count
        stats["requests_errors"] = stats.get("requests_errors", 0) + self.not_counted
        stats["requests_queued"] = stats.get("requests_queued", 0) + self.not_counted
        return stats

    def catch_up(self) -> None:
        """Make psycopg_pool do now what it does later.

        It closes surplus connections after `max_idle`, and counts callers whose timeout expired as
        waiting until the next connection is returned.
        """
        pool = self.pool
        while pool._nconns > pool._max_size and pool._pool:
            pool._nconns_min = len(pool._pool)
            pool._shrink_pool()
        for late in [waiter for waiter in pool._waiting if waiter.error]:
            pool._waiting.remove(late)


class Pair:
    """Both pools, with the operations that run on both."""

    def __init__(self, plan: Plan, observer: psycopg.Connection[Any]) -> None:
        self.plan = plan
        self.observer = observer
        number = next(_numbers)
        self.theirs = self._side(psycopg_pool.ConnectionPool, f"theirs_{number}")
        self.ours = self._side(
            reservoir.ConnectionPool,
            f"ours_{number}",
            creation_rate=10_000.0,
            endpoint=f"pair-{number}",
        )
        self.sides = (self.theirs, self.ours)
        for logger, side in zip(LOGGERS, self.sides, strict=True):
            logging.getLogger(logger).addHandler(side.warnings)

    def _side(self, kind: Any, table: str, **more: Any) -> Side:
        moods = Moods()
        self.observer.execute(
            sql.SQL("create unlogged table {} (n int unique deferrable initially deferred)").format(
                sql.Identifier(table)
            )
        )
        conninfo, options = self.plan.arguments(moods, table)
        return Side(kind(conninfo, **options, **more), table, moods, self.observer)

    def both(self, call: Callable[[Side], object]) -> object:
        """Call a function on both sides; assert that the outcomes are equal, and return them."""
        self.theirs.catch_up()
        theirs = outcome(lambda: call(self.theirs))
        ours = outcome(lambda: call(self.ours))
        assert ours == theirs, f"psycopg_pool: {theirs}; ours: {ours}"
        return ours

    def each(self, call: Callable[[Side], object]) -> None:
        """Call a function on both sides."""
        for side in self.sides:
            call(side)

    def in_threads(self, call: Callable[[Side], object]) -> list[threading.Thread]:
        """Call a function that waits in the queue on both sides, each in its own thread."""
        self.theirs.catch_up()
        threads = [threading.Thread(target=call, args=[side]) for side in self.sides]
        for thread, side in zip(threads, self.sides, strict=True):
            thread.start()
            while not side.pool.get_stats()["requests_waiting"]:
                time.sleep(0.001)
        return threads

    def set_mood(self, callback: str, mood: str) -> None:
        """Set what a callback does at its next call, on both sides."""
        self.each(lambda side: setattr(side.moods, callback, mood))

    def close(self) -> None:
        """Close both pools, and all connections that they have handed out."""
        for logger, side in zip(LOGGERS, self.sides, strict=True):
            side.pool.close()
            side.clear()
            logging.getLogger(logger).removeHandler(side.warnings)
