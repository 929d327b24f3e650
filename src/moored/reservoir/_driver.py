"""What a pool must know of a driver: how to open, settle, look at and close a connection.

A driver for asyncio gives coroutines where one for threads gives results; everything else is the
same. Those that are known are found by what `connect` is, or by the class of what it returns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

__all__ = ["Driver", "DriverState", "Hooks", "driver_of", "in_time"]

Connect = Callable[..., Any]


class DriverState(Enum):
    """What a connection that comes back is in the middle of."""

    IDLE = "idle"
    TRANSACTION = "in a transaction"
    BUSY = "in the middle of an operation"
    BROKEN = "broken"


class Driver:
    """A driver of which nothing is known: the connection is any object at all."""

    name: ClassVar[str] = "any"
    #: Whether its connections are for asyncio, for threads, or for whoever.
    kind: ClassVar[Literal["asyncio", "threads", "any"]] = "any"
    #: Whether it can tell if a transaction is open.
    knows_state: ClassVar[bool] = True
    #: Whether `close` never waits for anything.
    closes_at_once: ClassVar[bool] = False

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def connect(self, conninfo: str, options: dict[str, Any]) -> Any:
        """Open a connection (or return what opens it, to be awaited)."""
        return self._connect(conninfo, **options) if conninfo else self._connect(**options)

    def adopt(self, conn: Any, pool: Any) -> None:
        """The connection belongs to this pool from now on; None when it leaves it."""

    def clean(self, conn: Any) -> bool:
        """Whether it works and nothing is under way: the usual case, so it must be cheap."""
        return self.state(conn) is DriverState.IDLE

    def state(self, conn: Any) -> DriverState:
        """What it is in the middle of."""
        return DriverState.BROKEN if self.is_broken(conn) else DriverState.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether it is known to be of no use, without asking the server."""
        return bool(getattr(conn, "closed", False) is True)

    def interrupted(self, error: BaseException | None) -> bool:
        """Whether it was left in the middle of an answer (by a Ctrl-C, or a cancelled task), which
        the next caller would take for its own; not where the driver sees to that itself."""
        return error is not None and not isinstance(error, Exception)

    def suspects(self, conn: Any, error: BaseException) -> bool:
        """Whether an error during its use leaves a doubt that only a ping can settle."""
        return False

    def commit(self, conn: Any) -> Awaitable[None] | None:
        """End its transaction."""

    def rollback(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Undo its transaction; raises if the server does not answer in time."""

    def interrupt(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Cancel the statement that a `BUSY` connection executes, and wait until the server has
        ended it; raises if that takes longer than the timeout."""

    def ping(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Ask the server for a sign of life; raises if there is none."""

    def cut(self, conn: Any) -> None:
        """Close it as far as that takes no time, unless a statement runs; `close` does the rest."""

    def resetter(self) -> Callable[[Any], Any] | None:
        """What makes the session of a connection as new, if the driver's own pool does so."""
        return None

    def close(self, conn: Any) -> Awaitable[None] | None:
        """Close it."""
        close = getattr(conn, "close", None)
        result: Awaitable[None] | None = None if close is None else close()
        return result

    def __repr__(self) -> str:
        return f"<Driver {self.name}>"


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the user knows better than a driver's defaults do."""

    is_broken: Callable[[Any], bool] | None = None
    ping: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None

    def over(self, driver: Driver) -> Driver:
        """The driver with these hooks in place of its own."""
        if self.is_broken is not None:
            _hook_is_broken(driver, self.is_broken)
        if (ping := self.ping) is not None:
            driver.ping = lambda conn, timeout: in_time(ping(conn), timeout)  # type: ignore[method-assign]
        if (close := self.close) is not None:
            driver.close = lambda conn: _let_go(driver, conn, close)  # type: ignore[method-assign]
            driver.cut = lambda conn: None  # type: ignore[method-assign]
            driver.closes_at_once = False  # type: ignore[misc]
        return driver


def _let_go(driver: Driver, conn: Any, close: Callable[[Any], Any]) -> Any:
    """Close a connection by the user's function; it must not lead back to the pool."""
    driver.adopt(conn, None)
    return close(conn)


def in_time(answer: Any, timeout: float) -> Awaitable[None] | None:
    """What a user's function knows nothing of: how long its caller can wait."""
    if not inspect.isawaitable(answer):
        return None

    async def within() -> None:
        async with asyncio.timeout(timeout):
            await answer

    return within()


def _hook_is_broken(driver: Driver, is_broken: Callable[[Any], bool]) -> None:
    known_state, known_broken = driver.state, driver.is_broken

    def broken(conn: Any) -> bool:
        return bool(is_broken(conn)) or known_broken(conn)

    def state(conn: Any) -> DriverState:
        return DriverState.BROKEN if is_broken(conn) else known_state(conn)

    driver.is_broken = broken  # type: ignore[method-assign]
    driver.state = state  # type: ignore[method-assign]
    driver.clean = lambda conn: state(conn) is DriverState.IDLE  # type: ignore[method-assign]


def driver_of(
    connect: Connect | None,
    connection_class: type | None = None,
    *,
    asynchronous: bool,
    sample: Any = None,
) -> Driver | None:
    """The driver that `connect` belongs to, or that a first connection (`sample`) shows.

    None, if only a first connection can tell.
    """
    from . import _asyncpg, _dbapi, _psycopg

    if connect is None:
        return _psycopg.driver(connection_class, asynchronous=asynchronous)
    home = getattr(connect, "__module__", None) or ""
    if home.split(".")[0] == "asyncpg":
        return _asyncpg.AsyncpgDriver(connect)
    if found := _psycopg.driver_for(connect, sample):
        return found
    if not asynchronous and (inspect.iscoroutinefunction(connect) or inspect.isawaitable(sample)):
        raise TypeError(
            f"what {connect!r} returns must be awaited, and this pool is for threads: use "
            "AsyncConnectionPool with it"
        )
    if sample is None:
        return None
    if type(sample).__module__.split(".")[0] == "asyncpg":
        return _asyncpg.AsyncpgDriver(connect)
    if _dbapi.fits(sample):
        return _dbapi.DbapiDriver(connect)
    return Driver(connect)
