"""Opening a connection and abandoning it, so that nothing is left behind at the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg

from moored import kernel
from moored.kernel import cut_socket, forget_frames

__all__ = ["connect", "cut", "uncancelled"]

T = TypeVar("T")


async def connect(conninfo: str, **options: Any) -> psycopg.AsyncConnection[Any]:
    """A connection of its own, in autocommit mode, which never prepares a statement.

    A replication connection takes only simple queries, and behind a pooler the next query may go
    to another server connection.

    An attempt that is cancelled, or takes longer than it may, is over at once for the server too.
    Otherwise a backend would wait for the rest of the handshake for a minute, and a command such
    as DROP DATABASE would wait for that backend.
    """
    try:
        return await psycopg.AsyncConnection.connect(
            conninfo, autocommit=True, prepare_threshold=None, **options
        )
    except asyncio.CancelledError as given_up:
        forget_frames(given_up)
        raise


def cut(connection: psycopg.AsyncConnection[Any]) -> None:
    """End a connection by its socket, without a word to the server; wake the tasks that use it."""
    with contextlib.suppress(psycopg.Error):
        cut_socket(connection.pgconn.socket)


async def uncancelled(
    conn: psycopg.AsyncConnection[Any], work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Await work on a connection, which is cut when its caller gives up or the timeout expires."""
    return await kernel.uncancelled(work, lambda: cut(conn), timeout)
