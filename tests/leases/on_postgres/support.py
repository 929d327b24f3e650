"""What the tests of the store in Postgres share."""

from __future__ import annotations

import asyncio
from typing import Any, LiteralString

import psycopg
import pytest
from tests.leases.conformance import request

from moored.kernel import Clock
from moored.leases import LeaseError, StoreUnavailable
from moored.leases.postgres import PostgresStore
from moored.leases.postgres import open_store as open_postgres

#: Seconds that a call of a far store may take; a busy machine may stop everything for two.
PATIENCE = 3.0

Database = psycopg.Connection[tuple[Any, ...]]


def rows(database: Database, query: LiteralString) -> list[tuple[Any, ...]]:
    return database.execute(query).fetchall()


async def refusal(url: str) -> LeaseError:
    opened = open_postgres(url, clock=Clock.current())
    try:
        with pytest.raises(LeaseError) as caught:
            await opened.open()
        return caught.value
    finally:
        await opened.close()


async def recovered(store: PostgresStore, limit: int = 99) -> Any:
    """What the store answers once it dares to connect again."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await store.acquire(request("db", limit=limit))
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def swept(store: PostgresStore) -> None:
    """Wait for the sweep that a renewal has begun, if it has."""
    await store._sweeps.drain()
