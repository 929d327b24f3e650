"""Wake the outboxes of other processes, outside of the publishers' transactions."""

from __future__ import annotations

import asyncio
import logging

import psycopg

from moored.kernel import describe

from ..server import _admin
from ._stack import Stack

__all__ = ["forward"]

log = logging.getLogger("moored.postgres")

#: The shortest time between two notifications: a few hundred in a second wake others soon enough.
PAUSE = 0.005
#: Seconds between two attempts to connect; other processes read every second meanwhile.
RETRY = 1.0


async def forward(stack: Stack) -> None:
    """Send one notification for each batch of transactions that have published.

    It runs where the stream is, on a connection of its own, which is opened for the first batch.
    """
    level = logging.WARNING
    while True:
        batch = await stack.published.unsent()
        try:
            async with await stack.connect(_admin.TIMEOUT) as conn:
                while True:
                    for channel, xids in batch.items():
                        query = "SELECT pg_notify(%(channel)s, %(xids)s)"
                        await _admin.rows(conn, query, channel=channel, xids=xids)
                    level = logging.WARNING
                    await asyncio.sleep(PAUSE)
                    batch = await stack.published.unsent()
        except (psycopg.Error, OSError) as error:  # a timeout, too
            text = "the outboxes of other processes are not woken, and read every second: %s"
            log.log(level, text, describe(error))
            level = logging.DEBUG
            await asyncio.sleep(RETRY)
