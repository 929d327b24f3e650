"""The slow path of a return: end the transaction, reset the session, keep the connection or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from moored.kernel import awaited, describe

from ._driver import PING_TIMEOUT, DriverState
from ._item import Item
from ._reservoir import Reservoir

__all__ = ["Returns"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")


class Returns(Generic[C]):
    """Cleans up the connections that are returned to one pool.

    :param interrupt: cancels a running statement of a cancelled task.
    """

    def __init__(self, reservoir: Reservoir[C], interrupt: Callable[[C], Awaitable[None]]) -> None:
        self._reservoir = reservoir
        self._name = reservoir.name
        self._interrupt = interrupt
        #: Resets the session of a connection; None if it is left unchanged.
        self.reset: Callable[[C], Any] | None = None
        #: Connections that could not be cleaned up, and were discarded.
        self.bad = 0

    async def settle(self, item: Item[C], error: BaseException | None) -> None:
        """End a block: commit, or roll back after an error, and return the connection."""
        driver, conn = self._reservoir.recipe.driver, item.conn
        doubt, settled = error, False
        try:
            if error is not None:
                await self._interrupt(conn)
            if driver.is_broken(conn) or driver.interrupted(error):
                return
            if error is None:
                await awaited(driver.commit(conn))
            else:
                await awaited(driver.rollback(conn, PING_TIMEOUT))
            settled = True
        except BaseException as failure:
            if not isinstance(error, asyncio.CancelledError):
                doubt = failure
            if error is None or not isinstance(failure, Exception):
                raise
            level = self._level_of_loss(doubt)
            log.log(level, "%s: rollback failed: %s", self._name, describe(failure))
        finally:
            await self.release(item, settled=settled, doubt=doubt)

    async def end_transaction(self, conn: C, error: BaseException | None) -> None:
        """Commit, or roll back after an error, a connection of an overridden `getconn`."""
        driver = self._reservoir.recipe.driver
        if error is None and not driver.is_broken(conn):
            await awaited(driver.commit(conn))
        elif error is not None and driver.state(conn) is DriverState.TRANSACTION:
            await awaited(driver.rollback(conn, PING_TIMEOUT))

    async def release(
        self, item: Item[C], *, settled: bool = False, doubt: BaseException | None = None
    ) -> None:
        """Clean up a connection and return it to the pool, or discard it.

        :param settled: whether its transaction was just committed or rolled back.
        :param doubt: an error after which the connection may be broken.
        """
        clean = False
        try:
            clean = await self._clean(item, settled, doubt)
        finally:
            if not clean:
                self.bad += 1
                self._reservoir.discard(item.conn, "bad")
        if clean:
            with self._reservoir.lock:
                waiter = self._reservoir.core.give(item, self._reservoir.clock.monotonic())
            self._reservoir.carry_out(waiter)

    def _level_of_loss(self, doubt: BaseException | None) -> int:
        """Return the level at which the loss of a connection is logged.

        A closed pool closes every connection anyway, and a caller that is cancelled may have cut
        its connection: that deserves no warning.
        """
        expected = not self._reservoir.usable or isinstance(doubt, asyncio.CancelledError)
        return logging.INFO if expected else logging.WARNING

    async def _clean(self, item: Item[C], settled: bool, doubt: BaseException | None) -> bool:
        """End what is in progress and reset the session; False if the connection is unusable."""
        driver, conn = self._reservoir.recipe.driver, item.conn
        if driver.interrupted(doubt):
            log.warning("%s: closing a connection whose statement was interrupted", self._name)
            return False
        await self._interrupt(conn)
        state = self._state_of(conn, settled)
        if state is DriverState.TRANSACTION:
            if driver.knows_state:
                text = "%s: rolling back a connection left in a transaction: %r"
                log.warning(text, self._name, conn)
            if not await self._succeeds("rollback failed", driver.rollback, conn, PING_TIMEOUT):
                return False
            state = self._state_of(conn, settled=True)
        if state is not DriverState.IDLE:
            level = self._level_of_loss(doubt)
            log.log(level, "%s: closing a connection that came back %s", self._name, state.value)
            return False
        if doubt is not None and driver.needs_ping(conn, doubt):
            lost = "closing a lost connection"
            if not await self._succeeds(lost, driver.ping, conn, PING_TIMEOUT):
                return False
        if self.reset is not None and not self._closes(item):
            if not await self._succeeds("the reset callback failed", self.reset, conn):
                return False
            state = self._state_of(conn, settled=True)
            if state is not DriverState.IDLE:
                text = "%s: the reset callback left a connection %s"
                log.warning(text, self._name, state.value)
                return False
        return True

    def _state_of(self, conn: C, settled: bool) -> DriverState:
        """The state of a connection; idle after a commit or rollback if its driver cannot tell."""
        driver = self._reservoir.recipe.driver
        state = driver.state(conn)
        if settled and state is DriverState.TRANSACTION and not driver.knows_state:
            return DriverState.IDLE
        return state

    def _closes(self, item: Item[C]) -> bool:
        """Whether a null pool will close this connection, which then needs no reset.

        If so, a caller that begins to wait from now on does not get the connection.
        """
        core = self._reservoir.core
        if core.config.keep:
            return False
        with self._reservoir.lock:
            if not core.waiting:
                core.retire(item, "not_kept")
        return item.retire_reason is not None

    async def _succeeds(self, failed: str, call: Callable[..., Any], *args: Any) -> bool:
        """Whether a call succeeds; its error is logged."""
        try:
            await awaited(call(*args))
        except Exception as error:
            log.warning("%s: %s: %s", self._name, failed, describe(error))
            return False
        return True
