"""What cannot be copied is refused, and how much is read at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from tests.postgres.conftest import MakePostgres, Sql
from tests.postgres.server import one, until

from moored.cli import main
from moored.postgres import ConfigurationError, Postgres, PostgresError
from moored.postgres.snapshot import _reader

from .orders import CREATE, LIMIT, ROWS, copied, item_of


def with_options(url: str, *settings: str) -> str:
    """Return the URL of sessions with these settings."""
    return f"{url}?options=" + quote(" ".join(f"-c {each}" for each in settings))


async def ids(pg: Postgres, **options: Any) -> list[int]:
    async with pg.snapshot("orders", **options) as snapshot:
        return sorted([row["id"] async for row in snapshot])


async def test_a_copy_without_the_rows_that_a_role_may_not_read_is_refused(
    streamed_url: str, stream_id: str, tmp_path: Path, sql: Sql
) -> None:
    role = f"reader_{stream_id}"
    await sql.execute(
        f"create role {role}; alter table orders enable row level security; "
        f"create policy few on orders to {role} using (id < 10)".encode()
    )
    try:
        async with Postgres(
            with_options(streamed_url, f"role={role}"),
            replication_url=streamed_url,
            stream_id=stream_id,
            state_dir=tmp_path,
        ) as pg:
            with pytest.raises(PostgresError, match=r"permission denied.*moored doctor"):
                await ids(pg)
            await sql.execute(f"grant select on orders to {role}".encode())
            for consistent in (False, True):
                with pytest.raises(PostgresError, match=r"row-level security.*moored doctor"):
                    await ids(pg, consistent=consistent)
            await sql.execute(f"alter role {role} bypassrls".encode())
            assert len(await ids(pg)) == ROWS
    finally:
        await sql.execute(f"drop owned by {role}; drop role {role}".encode())


async def test_tables_that_inherit_are_neither_copied_nor_published(
    make: MakePostgres, sql: Sql
) -> None:
    """If they were published without a replica identity, the server would refuse their updates."""
    await sql.execute("create table old_orders () inherits (orders)")
    await sql.execute("insert into old_orders values (1, 'of the child'), (900, 'too')")
    async with make() as pg, pg.follow("orders", consumer="c", chunk_rows=20) as follow:
        assert await copied(follow) == list(range(1, ROWS + 1))
        await sql.execute("insert into old_orders values (901); insert into orders values (99)")
        (change,) = await item_of(follow)
        assert change.new["id"] == 99
        assert await ids(pg, consistent=True) == [*range(1, ROWS + 1), 99]
        await sql.execute("update orders set name = 'a'; delete from old_orders where id = 901")
        assert len(await item_of(follow)) == ROWS + 1
        await follow.aclose()
        await pg.drop_consumer("c")
        none = "select not exists (select from pg_publication_tables)"
        await until(lambda: one(sql, none))


async def test_an_error_that_is_not_of_the_connection_is_raised(
    make: MakePostgres, sql: Sql
) -> None:
    remedies = {
        "57014": "lower chunk_rows, or raise statement_timeout",
        "54001": "simplify where=",
        "53100": "free disk space",
        "55P03": "raise lock_timeout",
    }
    await sql.execute(
        "create function fails(state text) returns bool language plpgsql as "
        "$$ begin raise 'it fails' using errcode = state; end $$"
    )
    async with make() as pg, asyncio.timeout(LIMIT):
        for state, remedy in remedies.items():
            for consistent in (False, True):
                with pytest.raises(PostgresError, match=f"it fails.*{remedy}"):
                    await ids(pg, where=f"fails('{state}')", consistent=consistent)


async def test_a_large_transaction_of_a_table_with_two_keys_is_filtered(
    streamed_url: str, stream_id: str, tmp_path: Path, sql: Sql
) -> None:
    await sql.execute("create table pairs (a int, b text, c int, primary key (a, b))")
    async with (
        Postgres(
            with_options(streamed_url, "max_stack_depth=100kB"),
            replication_url=streamed_url,
            stream_id=stream_id,
            state_dir=tmp_path,
        ) as pg,
        pg.follow("pairs", consumer="c", where="c % 2 = 0") as follow,
    ):
        assert list(await item_of(follow)) == []
        await sql.execute("insert into pairs select n, n, n from generate_series(1, 2500) n")
        changes = list(await item_of(follow))
    assert [change.new["c"] for change in changes if change.new] == list(range(2, 2501, 2))
    assert len([change for change in changes if change.new is None]) == 1250


async def test_a_table_whose_keys_cannot_be_compared_is_not_followed(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        for kind, value in (("interval", "1 year"), ("int[]", "{1,2}"), ("jsonb", "{}")):
            await sql.execute(f"create table odd (id {kind} primary key)".encode())
            await sql.execute(f"insert into odd values ('{value}')".encode())
            async with pg.snapshot("odd") as snapshot:
                assert len([row async for row in snapshot]) == 1
            async with pg.follow("odd", consumer=kind) as follow:
                with pytest.raises(ConfigurationError, match=r"values of id .* cannot be compared"):
                    await item_of(follow)
            await sql.execute("drop table odd")


async def test_large_rows_make_small_chunks(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reader, "CHUNK_BYTES", 30_000)
    async with make() as pg:
        for large, most in ((False, 20), (True, 2)):
            if large:
                await sql.execute("update orders set name = repeat('large ', 1700)")
            for consistent in (False, True):
                async with pg.snapshot("orders", chunk_rows=20, consistent=consistent) as snapshot:
                    sizes = [len(rows) async for rows in snapshot.chunks()]
                assert sum(sizes) == ROWS
                assert max(sizes) == most


async def test_a_string_is_no_list_of_columns(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        with pytest.raises(ValueError, match=r"columns='price' must be a list .* \['price'\]"):
            pg.snapshot("orders", columns="price")
        with pytest.raises(ValueError, match="columns='price' must be a list"):
            pg.follow("orders", consumer="c", columns="price")


async def test_a_condition_may_end_with_a_comment(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        assert await ids(pg, where="id > 48 -- the last ones") == [49, 50]


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(
    streamed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(streamed_url, autocommit=True) as conn:
        conn.execute(CREATE.encode())
    path = str(tmp_path / "missing" / "orders.tsv")
    assert main(["snapshot", "orders", "--database-url", streamed_url, "-o", path]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{path} cannot be written: No such file or directory" in error
