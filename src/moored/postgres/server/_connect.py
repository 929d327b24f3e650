"""Open and abort connections without leaving a backend behind at the server."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg

from moored import kernel
from moored.kernel import cut_socket, forget_frames

__all__ = ["connect", "cut", "has_input", "uncancelled"]

T = TypeVar("T")


async def connect(conninfo: str, **options: Any) -> psycopg.AsyncConnection[Any]:
    """Open a connection in autocommit mode that never prepares statements.

    A replication connection accepts only simple queries, and behind a pooler the next query may use
    another server connection.

    The socket of an attempt that is cancelled or times out is closed immediately. Otherwise the
    backend would wait a minute for the rest of the handshake, and a command such as DROP DATABASE
    would wait for that backend.
    """
    try:
        return await psycopg.AsyncConnection.connect(
            conninfo, autocommit=True, prepare_threshold=None, **options
        )
    except asyncio.CancelledError as cancelled:
        forget_frames(cancelled)  # they hold the socket
        raise


def has_input(fd: int) -> bool:
    """Whether a socket has bytes that were not read yet."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def cut(connection: psycopg.AsyncConnection[Any]) -> None:
    """Abort a connection by its socket, without a message to the server; wake its waiting tasks."""
    with contextlib.suppress(psycopg.Error):
        cut_socket(connection.pgconn.socket)


async def uncancelled(
    conn: psycopg.AsyncConnection[Any], work: Coroutine[Any, Any, T], timeout: float | None = None
) -> T:
    """Await work on a connection; abort the connection on cancellation or timeout."""
    return await kernel.uncancelled(work, lambda: cut(conn), timeout)
