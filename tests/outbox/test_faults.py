"""An outbox whose server is replaced, does not answer or has no connection left."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import psycopg
import pytest
from tests.frozen import frozen
from tests.postgres.server import connected, one, own_server, until

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Listener
from moored.postgres.outbox import Outbox, _wakes, ddl
from moored.reservoir import AsyncConnectionPool, PoolTimeout

from .conftest import Sql
from .reading import LIMIT, next_event

STORED = "select final from moored.outbox_state"


class Switched:
    """A pool in front of several servers, of which one is in use."""

    def __init__(self, url: str) -> None:
        self.url = url

    def connection(self) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        return connected(self.url)


async def test_what_is_final_is_stored_at_the_server_that_was_looked_at(url: str, sql: Sql) -> None:
    async with own_server() as other, connected(other.url) as there:
        await there.execute(ddl().encode())
        pool = Switched(url)
        async with Outbox(pool, retain=None) as outbox:
            await outbox.publish(sql, "orders", "1")
            await outbox.read()
            pool.url = other.url
        assert await one(there, STORED) == 0, "its next publisher has the id 1"
        async with Outbox(pool, retain=None) as outbox:
            await outbox.publish(there, "orders", "1")
            await outbox.read()
        assert await one(there, STORED) == 1


async def test_readers_that_share_a_failed_look_do_not_fail_one_after_the_other(url: str) -> None:
    async with AsyncConnectionPool(url, max_size=1, timeout=0.2) as pool, pool.connection(LIMIT):
        outbox = Outbox(pool)
        found = await asyncio.gather(*(outbox.read() for _ in range(20)), return_exceptions=True)
        assert {type(each) for each in found} == {PoolTimeout}
        # The first reader's look, and one for those that came later.
        assert pool.get_stats()["requests_errors"] == 2


async def test_a_reader_of_a_frozen_server_can_be_cancelled() -> None:
    with SyncEmbeddedPostgres() as server:
        async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as conn:
            await conn.execute(ddl().encode())
        async with AsyncConnectionPool(server.url, min_size=1, max_size=1) as pool:
            outbox = Outbox(pool)
            await outbox.read()
            with frozen(server):
                reading = asyncio.ensure_future(outbox.read())
                await asyncio.sleep(0.1)  # the statement is sent
                begun = time.monotonic()
                reading.cancel()
                await asyncio.wait({reading}, timeout=LIMIT)
                assert reading.cancelled()
                assert time.monotonic() - begun < 5.0
            assert (await outbox.read()).events == []


@pytest.mark.parametrize("payload", ["1,x", "1²", "9" * 5000, "1,"])
async def test_a_notification_of_someone_else_does_not_end_the_wake_ups(
    url: str, sql: Sql, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Listener(url) as listener, Outbox(url, listener=listener) as outbox:

        async def up() -> bool:
            return outbox.wakes.up

        async def notified() -> bool:
            return outbox.wakes.notified > before

        await until(up)
        before = outbox.wakes.notified
        await sql.execute("select pg_notify('moored_outbox', %s)", [payload])
        await until(notified)
        assert outbox.wakes.up
    assert "cannot subscribe" not in caplog.text


async def test_a_transaction_of_another_server_is_not_waited_for_without_end(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wakes, "POLL_DOWN", 3600.0)
    monkeypatch.setattr(_wakes, "INVISIBLE", 1.0)
    async with (
        AsyncConnectionPool(url, max_size=2) as pool,
        Listener(url) as listener,
        Outbox(pool, listener=listener, retain=None) as outbox,
        outbox.consume("search") as events,
    ):
        waiting = asyncio.ensure_future(next_event(events))

        async def up() -> bool:
            return outbox.wakes.up

        async def reads_again() -> bool:
            before = pool.get_stats()["requests_num"]
            await asyncio.sleep(0.6)
            return pool.get_stats()["requests_num"] > before

        async def rests() -> bool:
            return not await reads_again()

        await until(up)
        await sql.execute(
            "select pg_notify('moored_outbox', ((pg_current_xact_id()::text::bigint + 1000000)"
            " % 4294967296)::text)"
        )
        await until(reads_again)
        await until(rests)
        await outbox.publish(sql, "orders", "1")
        assert (await waiting).payload == "1"
