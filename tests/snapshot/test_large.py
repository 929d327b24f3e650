"""Transactions with many changes: joined in pieces, while other tasks run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.held import holds
from tests.postgres.conftest import MakePostgres, Sql

from moored.postgres import Transaction, Update
from moored.testing import scaled

from .mirror import Copy, contents
from .orders import LIMIT, copied, item_of

MANY = scaled(300_000, least=20_000)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "columns": {"columns": ["id", "price"]},
    "where": {"where": "id % 3 > 0"},
}


async def fill(sql: Sql, rows: int, name: str = "'order ' || n") -> None:
    await sql.execute(
        f"truncate orders; insert into orders select n, {name}, n from generate_series(1, {rows}) n"
        .encode()
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_of_many_rows_does_not_hold_the_loop(
    make: MakePostgres, sql: Sql, kind: str
) -> None:
    await fill(sql, MANY)
    every = range(1, MANY + 1)
    expected = sum(2 * n for n in every if kind != "where" or n % 3)
    async with make() as pg, pg.follow("orders", consumer="c", **KINDS[kind]) as follow:
        await copied(follow)

        async def update() -> None:
            prices = 0
            await sql.execute("update orders set price = 2 * id")
            txn = await item_of(follow)
            assert isinstance(txn, Transaction)
            async for change in txn:
                if change.new is not None:
                    prices += change.new["price"]
            assert prices == expected

        assert not await holds(update)


async def test_many_changes_of_other_tables_do_not_hold_the_loop(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute(
        "create table big as select n, 0 as seen from generate_series(1, 300000) n; "
        "alter table big add primary key (n)"
    )
    others = "big", "orders"
    async with (
        make() as pg,
        pg.changes("all", tables=others) as everything,
        pg.changes("own", tables=["orders"]) as own,
        pg.follow("orders", consumer="columns", **KINDS["columns"]) as columns,
        pg.follow("orders", consumer="where", **KINDS["where"]) as where,
    ):
        await pg.wait_until_published(*others)
        await copied(columns)
        await copied(where)

        async def update() -> None:
            await sql.execute(
                "begin; update big set seen = 1; update orders set price = 0 where id = 1; commit"
            )
            for items in own, columns, where:
                async with asyncio.timeout(LIMIT):
                    txn = await anext(items)
                assert isinstance(txn, Transaction)
                (change,) = [each async for each in txn]
                assert isinstance(change, Update)
                assert change.new is not None
                assert change.new["price"] == 0
                await txn.ack()
            assert len(await anext(everything)) == 300_001

        assert not await holds(update)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["int", "text"])
async def test_a_large_transaction_is_joined_while_the_table_is_copied(
    make: MakePostgres, sql: Sql, streamed_url: str, kind: str, key: str
) -> None:
    """It is larger than what is kept in memory, and has every kind of change."""
    rows, large = 2400, "repeat(md5(n::text), 250)"
    await fill(sql, rows, large)
    options = KINDS[kind]
    if key == "text":
        await sql.execute("alter table orders alter id type text")
        options = {**options, "where": "id::int % 3 > 0"} if "where" in options else options
    number, cast = f"id::{key}::int", f"::{key}"
    copy = Copy("id", exact=kind == "plain")
    async with make() as pg, pg.follow("orders", consumer="c", chunk_rows=800, **options) as follow:
        copy.apply(await item_of(follow))
        await sql.execute(
            f"begin; update orders set price = {number} + 1, name = repeat(md5(price::text), 250); "
            f"update orders set id = ({number} + {2 * rows}){cast} where {number} % 7 = 0; "
            f"delete from orders where {number} % 11 = 0; "
            f"insert into orders values ('0'{cast}, 'new', 0); commit".encode()
        )
        truth = await contents(streamed_url, "orders", "id", where=options.get("where", "true"))
        if "columns" in options:
            truth = {k: {"id": v["id"], "price": v["price"]} for k, v in truth.items()}
        async with asyncio.timeout(LIMIT):
            while not follow.progress.complete or copy.differences(truth):
                copy.apply(item := await item_of(follow))
                await item.ack()


async def test_a_changed_row_whose_key_is_nan_is_delivered(make: MakePostgres, sql: Sql) -> None:
    await sql.execute(
        "create table odd (id float8 primary key, amount int); insert into odd values ('NaN', 1)"
    )
    async with make() as pg, pg.follow("odd", consumer="c", where="amount > 0") as follow:
        await copied(follow)
        await sql.execute("update odd set amount = 2")
        (change,) = await item_of(follow)
        assert change.kind == "update"
        assert change.new["amount"] == 2
