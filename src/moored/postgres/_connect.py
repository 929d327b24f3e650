"""The driver's connect, so that an attempt that is given up leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from moored.kernel import forget_frames

__all__ = ["connect"]


async def connect(conninfo: str, **options: Any) -> psycopg.AsyncConnection[Any]:
    """A connection of its own, in autocommit mode.

    An attempt that is cancelled, or takes longer than it may, is over at once for the server too.
    Otherwise a backend would wait for the rest of the handshake for a minute, and a command such
    as DROP DATABASE would wait for that backend.
    """
    try:
        return await psycopg.AsyncConnection.connect(conninfo, autocommit=True, **options)
    except asyncio.CancelledError as given_up:
        forget_frames(given_up)
        raise
