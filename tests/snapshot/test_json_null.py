"""JSON null and SQL NULL of a mirrored table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb, set_json_loads
from tests.docs.pages import block_with, page, run
from tests.postgres.conftest import MakePostgres, Sql

from moored.postgres import Postgres, Rows, Transaction

from .orders import item_of


@pytest.fixture
def reset_loads() -> Iterator[None]:
    yield
    set_json_loads(json.loads)


async def mirrored(pg: Postgres, sql: Sql) -> list[dict[str, Any]]:
    """Return a copied and a changed row, each with a JSON null and a SQL NULL."""
    await sql.execute("create table notes (id int primary key, a jsonb, b json, c jsonb, d json)")
    await sql.execute("insert into notes values (1, 'null', 'null', null, null)")
    found: list[dict[str, Any]] = []
    async with pg.follow("notes", consumer="c") as follow:
        while len(found) < 2:
            item = await item_of(follow)
            if isinstance(item, Rows) and item:
                found += item
                await sql.execute("insert into notes values (2, 'null', ' null ', null, null)")
            elif isinstance(item, Transaction):
                found += [dict(change.new) for change in item if change.new]
    return found


async def test_both_are_none_by_default(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        for row in await mirrored(pg, sql):
            assert [*row.values()][1:] == [None] * 4


async def test_the_documented_loader_tells_them_apart(
    make: MakePostgres, sql: Sql, streamed_url: str, reset_loads: None
) -> None:
    await run(block_with(page("topics/snapshots"), "set_json_loads"), {"json": json})
    async with make() as pg:
        rows = await mirrored(pg, sql)
    assert len(rows) == 2
    async with await psycopg.AsyncConnection.connect(streamed_url) as conn:
        for row in rows:
            assert isinstance(row["a"], Jsonb)
            # It is written to another database as it was read.
            cursor = await conn.execute(
                "select %(a)s is null, %(b)s is null, %(c)s::jsonb is null, %(d)s::json is null",
                dict(row),
            )
            assert await cursor.fetchone() == (False, False, True, True)
