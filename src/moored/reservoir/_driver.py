"""The interface to database drivers: open, commit, roll back, check and close a connection.

The methods of a driver for asyncio return awaitables where those of a driver for threads block.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

__all__ = ["PING_TIMEOUT", "Driver", "DriverState", "Hooks", "in_time"]

Connect = Callable[..., Any]

#: How long the server may take to answer a ping or a rollback.
PING_TIMEOUT = 5.0


class DriverState(Enum):
    """The state of a connection that is returned to the pool."""

    IDLE = "idle"
    TRANSACTION = "in a transaction"
    BUSY = "with a statement in progress"
    BROKEN = "broken"


class Driver:
    """The base class of drivers, and the driver for connections of an unknown type."""

    name: ClassVar[str] = "any"
    #: Whether its connections are for asyncio, for threads, or for both.
    kind: ClassVar[Literal["asyncio", "threads", "any"]] = "any"
    #: Whether `state` reports open transactions.
    knows_state: ClassVar[bool] = True
    #: Whether a connection works on every event loop, and not only on the one that opened it.
    any_loop: ClassVar[bool] = False
    #: Whether `close` never blocks.
    closes_at_once: ClassVar[bool] = False

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def connect(self, conninfo: str, options: dict[str, Any]) -> Any:
        """Open a connection, or return an awaitable that opens one."""
        return self._connect(conninfo, **options) if conninfo else self._connect(**options)

    def set_pool(self, conn: Any, pool: Any) -> None:
        """Set the pool that the connection belongs to; None when it leaves the pool."""

    def clean(self, conn: Any) -> bool:
        """Whether the connection works and is idle; called at every return, so it must be fast."""
        return self.state(conn) is DriverState.IDLE

    def state(self, conn: Any) -> DriverState:
        """The state of the connection."""
        return DriverState.BROKEN if self.is_broken(conn) else DriverState.IDLE

    def busy(self, conn: Any) -> bool:
        """Whether a statement is running, as far as the driver shows it; from any thread."""
        return False

    def is_broken(self, conn: Any) -> bool:
        """Whether the connection is known to be unusable, without a query to the server."""
        return bool(getattr(conn, "closed", False) is True)

    def interrupted(self, error: BaseException | None) -> bool:
        """Whether an error (Ctrl-C, or a cancelled task) may have left an unread answer.

        The next caller would take that answer for its own. False if the driver detects this itself.
        """
        return error is not None and not isinstance(error, Exception)

    def needs_ping(self, conn: Any, error: BaseException) -> bool:
        """Whether the connection may be lost after this error, so that it must be pinged."""
        return False

    def commit(self, conn: Any) -> Awaitable[None] | None:
        """Commit the transaction."""

    def rollback(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Roll back the transaction; raise if the server does not answer in time."""

    def interrupt(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Cancel the running statement of a `BUSY` connection, and wait until it has ended.

        Raise if that takes longer than the timeout.
        """

    def ping(self, conn: Any, timeout: float) -> Awaitable[None] | None:
        """Query the server; raise if it does not answer in time."""

    def close_socket(self, conn: Any) -> None:
        """Close the socket if that does not block and no statement is running."""

    def resetter(self) -> Callable[[Any], Any] | None:
        """Return the function that resets a session, if the driver's own pool resets sessions."""
        return None

    def close(self, conn: Any) -> Awaitable[None] | None:
        """Close the connection."""
        close = getattr(conn, "close", None)
        result: Awaitable[None] | None = None if close is None else close()
        return result


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The user's functions that replace those of a driver."""

    is_broken: Callable[[Any], bool] | None = None
    ping: Callable[[Any], Any] | None = None
    close: Callable[[Any], Any] | None = None

    def apply_to(self, driver: Driver) -> Driver:
        """Replace the driver's methods by these hooks, and return it."""
        if self.is_broken is not None:
            _hook_is_broken(driver, self.is_broken)
        if (ping := self.ping) is not None:
            driver.ping = lambda conn, timeout: in_time(ping(conn), timeout)  # type: ignore[method-assign]
        if (close := self.close) is not None:
            driver.close = lambda conn: _close_by_hook(driver, conn, close)  # type: ignore[method-assign]
            driver.close_socket = lambda conn: None  # type: ignore[method-assign]
            driver.closes_at_once = False  # type: ignore[misc]
        return driver


def _close_by_hook(driver: Driver, conn: Any, close: Callable[[Any], Any]) -> Any:
    """Close a connection by the user's function, which must not return it to the pool."""
    driver.set_pool(conn, None)
    return close(conn)


def in_time(answer: Any, timeout: float) -> Awaitable[None] | None:
    """Add a timeout to the awaitable that a user's function returned; None for a plain result."""
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

    def clean(conn: Any) -> bool:
        try:
            return state(conn) is DriverState.IDLE
        except Exception:
            return False  # the return discards the connection, and raises the error

    driver.is_broken = broken  # type: ignore[method-assign]
    driver.state = state  # type: ignore[method-assign]
    driver.clean = clean  # type: ignore[method-assign]
