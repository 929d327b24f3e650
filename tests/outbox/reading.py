"""Small helpers of the tests of the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from moored.postgres import Reset
from moored.postgres.outbox import OutboxConsumer, OutboxEvent

__all__ = ["LIMIT", "next_event", "next_reset", "payloads", "publishing", "transaction"]

#: How long anything may take that takes a moment on an idle machine, in seconds.
LIMIT = 30.0


async def next_event(events: OutboxConsumer) -> OutboxEvent:
    """The next item, which must be an event."""
    item = await asyncio.wait_for(anext(events), LIMIT)
    assert isinstance(item, OutboxEvent), item
    return item


async def next_reset(events: OutboxConsumer) -> str:
    """The reason of the next item, which must be a reset."""
    item = await asyncio.wait_for(anext(events), LIMIT)
    assert isinstance(item, Reset), item
    return item.reason


async def payloads(events: OutboxConsumer, count: int) -> list[str]:
    """The payloads of the next events, which are acknowledged."""
    found = []
    for _ in range(count):
        event = await next_event(events)
        found.append(event.payload)
        await event.ack()
    return found


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A connection whose transaction has begun, and has a transaction ID."""
    async with await psycopg.AsyncConnection.connect(url) as conn:
        await conn.execute("select pg_current_xact_id()")
        yield conn


@asynccontextmanager
async def publishing(url: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A connection whose transaction has published an event, and is open."""
    async with transaction(url) as conn:
        await conn.execute("select moored.outbox_publish('orders', 'open')")
        yield conn
