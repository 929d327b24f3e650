"""Opening a connection and abandoning it, so that nothing is left behind at the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg

from moored.kernel import forget_frames

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
    """End a connection by its socket, without a word to the server; wake whoever waits on it."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.pgconn.socket)) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


async def uncancelled(
    conn: psycopg.AsyncConnection[Any], work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Await work on a connection, which is cut, not cancelled, when nobody waits for it any more.

    For a statement that is cancelled, the driver asks a server that may be silent, for up to 10 s,
    to cancel it, and raises what that server says instead of the cancellation.
    """
    asking = asyncio.ensure_future(work)
    # What it says when nobody waits for it any more is nobody's.
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        answered, _ = await asyncio.wait({asking}, timeout=timeout)
    finally:
        if not asking.done():
            cut(conn)
            await asyncio.wait({asking})
    if not answered:
        raise TimeoutError(f"the server did not answer within {timeout:g} s")
    return asking.result()
