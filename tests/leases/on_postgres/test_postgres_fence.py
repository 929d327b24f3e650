"""Fenced writes to Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.rows import dict_row

from moored.leases import FenceRejected, LeaseLost, StoreMisconfigured
from moored.leases.postgres import ddl, fenced, fenced_sync


@pytest.fixture
def prepared_url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(ddl().encode())
        connection.execute("create table report (text text)")
    return postgres_url


@pytest.fixture
async def connection(prepared_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    connected = await psycopg.AsyncConnection.connect(prepared_url)
    async with connected:
        yield connected


async def write(connection: psycopg.AsyncConnection, text: str, fence: int) -> None:
    async with connection.transaction():
        await fenced(connection, "report", fence)
        await connection.execute("insert into report values (%s)", [text])


async def written(connection: psycopg.AsyncConnection) -> list[str]:
    cursor = await connection.execute("select text from report order by ctid")
    return [text for (text,) in await cursor.fetchall()]


async def test_the_newest_owner_may_write(connection: psycopg.AsyncConnection) -> None:
    await write(connection, "first", 5)
    await write(connection, "again", 5)
    await write(connection, "second", 6)
    assert await written(connection) == ["first", "again", "second"]


async def test_an_old_owner_is_rejected(connection: psycopg.AsyncConnection) -> None:
    await write(connection, "new", 1_763_000_000_000_002)
    with pytest.raises(FenceRejected) as caught:
        await write(connection, "old", 1_763_000_000_000_001)
    assert await written(connection) == ["new"]
    error = caught.value
    assert isinstance(error, LeaseLost)
    assert (error.resource, error.fence, error.seen) == (
        "report",
        1_763_000_000_000_001,
        1_763_000_000_000_002,
    )
    assert "stop" in str(error)


async def test_a_transaction_that_is_rolled_back_leaves_no_fence(
    connection: psycopg.AsyncConnection,
) -> None:
    await fenced(connection, "report", 9)
    await connection.rollback()
    await write(connection, "older, and the newest that wrote", 8)


async def test_resources_have_fences_of_their_own(connection: psycopg.AsyncConnection) -> None:
    await fenced(connection, "a", 9)
    await fenced(connection, "b", 3)


async def test_two_owners_at_once_write_one_after_the_other(prepared_url: str) -> None:
    old = await psycopg.AsyncConnection.connect(prepared_url)
    new = await psycopg.AsyncConnection.connect(prepared_url)
    async with old, new:
        await fenced(old, "report", 5)
        await old.execute("insert into report values ('old')")
        later = asyncio.ensure_future(write(new, "new", 6))
        await asyncio.sleep(0.1)
        # The old one was there first, so it may end what it began; then never again.
        assert not later.done()
        await old.commit()
        await later
        assert await written(new) == ["old", "new"]
        with pytest.raises(FenceRejected):
            await write(old, "too late", 5)


async def test_fenced_refuses_autocommit_connections(prepared_url: str) -> None:
    connection = await psycopg.AsyncConnection.connect(prepared_url, autocommit=True)
    async with connection:
        with pytest.raises(ValueError, match="transaction"):
            await fenced(connection, "report", 5)
        async with connection.transaction():
            await fenced(connection, "report", 5)


async def test_fenced_works_with_any_row_factory(prepared_url: str) -> None:
    connection = await psycopg.AsyncConnection.connect(prepared_url, row_factory=dict_row)
    async with connection:
        await fenced(connection, "report", 6)
        with pytest.raises(FenceRejected, match="fence 6"):
            await fenced(connection, "report", 5)


async def test_a_missing_guards_table_is_reported_with_its_ddl(postgres_url: str) -> None:
    connection = await psycopg.AsyncConnection.connect(postgres_url)
    async with connection:
        with pytest.raises(StoreMisconfigured, match="create table if not exists"):
            await fenced(connection, "report", 5)


def test_fenced_sync_works_without_asyncio(prepared_url: str) -> None:
    with psycopg.connect(prepared_url) as connection:
        fenced_sync(connection, "report", 6)
        connection.commit()
        with pytest.raises(FenceRejected):
            fenced_sync(connection, "report", 5)
        connection.rollback()
    with psycopg.connect(prepared_url, autocommit=True) as connection:
        with pytest.raises(ValueError, match="transaction"):
            fenced_sync(connection, "report", 7)
        with connection.transaction():
            fenced_sync(connection, "report", 7)
