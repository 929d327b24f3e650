"""The stream is the same, read from the socket or, as when it is encrypted, by libpq."""

from __future__ import annotations

import asyncio

import pytest
from tests.soaking import some_of

from moored.postgres import Changes, Postgres, Transaction
from moored.postgres.stream import _link

from .conftest import MakePostgres, Sql
from .server import LIMIT, following, ids, one, published, until, walsender

pytestmark = pytest.mark.every_loop


# The tests of TLS read by libpq, too.
@pytest.fixture(params=some_of(["line", "libpq"], "line"), autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the stream is read."""
    if request.param == "libpq":
        monkeypatch.setattr(_link, "STARTED", b"never so")
    return str(request.param)


def read_by_line(pg: Postgres) -> bool:
    assert pg._restarter.manager.client is not None
    assert pg._restarter.manager.client._link is not None
    return pg._restarter.manager.client._link._line is not None


async def collected(changes: Changes, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(LIMIT):
        while len(found) < count:
            txn = await anext(changes)
            assert isinstance(txn, Transaction)
            found += ids(txn)
            await txn.ack()
    return found


async def test_rows_of_all_sizes_are_received_unchanged(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, way: str
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(streamed_url, stream_id)
        await sql.execute(
            "insert into orders select n, repeat(chr(97 + n % 26), 1 << n) "
            "from generate_series(0, 22) n"
        )
        txn = await following(changes)
        assert read_by_line(pg) is (way == "line")
        found = [change.new for change in txn]
        assert found == [{"id": n, "name": chr(97 + n % 26) * 2**n} for n in range(23)]


async def test_many_transactions_are_received_in_order(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(streamed_url, stream_id)
        await sql.execute(
            "do $$ begin for n in 1 .. 3000 loop insert into orders values (n, n); commit; "
            "end loop; end $$"
        )
        assert await collected(changes, 3000) == list(range(1, 3001))
        await until_safe(sql, pg)


async def until_safe(sql: Sql, pg: Postgres) -> None:
    """Wait until the server knows that everything is acknowledged: the way back works, too."""
    query = (
        "select confirmed_flush_lsn >= pg_current_wal_insert_lsn() from pg_replication_slots "
        "where slot_name = %s"
    )

    async def safe() -> object:
        return await one(sql, query, pg.settings.slot_name)

    await until(safe)


async def test_a_new_link_continues_after_the_sender_was_terminated(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(streamed_url, stream_id)
        await sql.execute("insert into orders values (1, 'a')")
        assert await collected(changes, 1) == [1]
        pid = await walsender(sql, pg)
        await one(sql, "select pg_terminate_backend(%s)", pid)
        await sql.execute("insert into orders values (2, 'b')")
        found = await collected(changes, 1)
        while found[-1] != 2:
            found += await collected(changes, 1)
        errors = [event.detail for event in pg.last_events if event.name == "connection_error"]
        assert any("terminating connection due to administrator command" in e for e in errors)
