"""What it takes to be a pool beneath another pool, whose owner may call at odd times.

SQLAlchemy's pool gives back what nobody refers to any more from the garbage collector: in any
thread, in the middle of anything, also where that thread holds the lock of a reservoir. And its
engines outlive event loops.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Callable
from typing import Any

from ._errors import PoolClosed
from ._pool import Pool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool

__all__ = ["abandon", "close_soon", "holds", "later", "open_once", "unread"]

log = logging.getLogger("moored.reservoir")

#: How long a lock is waited for that others hold for microseconds, before this thread is believed
#: to hold it itself.
PATIENCE = 0.2

# Closings that nobody waits for; a loop does not hold on to its tasks.
_closing: set[asyncio.Task[None]] = set()


def open_once(pool: ConnectionPool[Any]) -> None:
    """Open a pool that is new, from any thread."""
    if pool.reservoir.state == "new":
        try:
            pool.open()
        except PoolClosed:
            if pool.reservoir.state != "open":
                raise  # else another thread was faster


def holds(lock: threading.Lock) -> bool:
    """Whether this thread holds a lock that it is about to take."""
    if lock.acquire(timeout=PATIENCE):
        lock.release()
        return False
    return True


def later(pool: Pool[Any], call: Callable[[], Any]) -> None:
    """Do something on the pool's own loop, soon; from any thread, and without a lock."""
    loop = pool.reservoir.works._loop
    if loop is not None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop has ended, and with it the pool


def unread(conn: Any) -> bool:
    """Whether the server has said something that asyncpg has not read yet: it may be a farewell.

    psycopg needs no such look: it reads when it is looked at.
    """
    transport = getattr(conn, "_transport", None)
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def close_soon(pool: Pool[Any]) -> None:
    """Close a pool that nobody waits for."""

    def begin() -> None:
        closing = pool.close() if isinstance(pool, AsyncConnectionPool) else pool.reservoir.stop()
        task = asyncio.get_running_loop().create_task(closing, name=f"{pool.name}-close")
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    later(pool, begin)


def abandon(pool: AsyncConnectionPool[Any]) -> None:
    """Let go of a pool whose event loop has ended."""
    reservoir = pool.reservoir
    log.warning(
        "%s: its event loop has ended, so its connections end without a farewell, and leases by "
        "their time: close it (or dispose of its engine) before the loop ends",
        pool.name,
    )
    reservoir.state = "closed"
    reservoir.on_change_of_state()
    reservoir.core.close()
    for item in [*reservoir.core.items.values(), *reservoir.core.retired]:
        try:
            farewell = reservoir.recipe.driver.close(item.conn)
        except RuntimeError:
            continue  # asyncpg needs the loop even for this
        if asyncio.iscoroutine(farewell):
            farewell.close()
