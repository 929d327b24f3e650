"""The table under a consumer is dropped, recreated, swapped, unpublished and altered."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from tests.stories.support import all_copied, migrate, replica, tenants

from moored.testing import scaled

ROUNDS = scaled(20, least=1)
NEW = "(id int primary key, org uuid not null)"
#: Three times the seconds that are promised: the machine may be busy.
TOLD = 9.0
#: What an operator does, and whether the consumer must copy the table again.
CHANGES = {
    "dropped and recreated": ([f"drop table orders; create table orders {NEW}"], True),
    "dropped, and created later": (
        ["drop table orders", "select pg_sleep(2)", f"create table orders {NEW}"],
        True,
    ),
    "swapped": (
        [
            f"create table fresh {NEW}; insert into fresh select id + 1000000, org from orders",
            "alter table orders rename to old; alter table fresh rename to orders; drop table old",
        ],
        True,
    ),
    "unpublished": (
        ["alter publication moored_publication_default drop table orders"],
        True,
    ),
    "not all published": (
        ["alter publication moored_publication_default set (publish = 'insert')"],
        True,
    ),
    "column with a default added": (["alter table orders add column a int default 7"], True),
    "column added": (["alter table orders add column b int"], False),
    "column renamed": (["alter table orders rename column b to c"], False),
    "column dropped": (["alter table orders drop column c"], False),
}


async def test_a_table_that_is_dropped_recreated_and_altered(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    [acme], numbers, told = tenants(1), itertools.count(1), dict[str, list[float]]()
    async with (
        replica(postgres_url, tmp_path) as shop,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
    ):

        async def order() -> None:
            await conn.execute("insert into orders values (%s, %s)", [next(numbers), acme])

        async def resets() -> int:
            row = await (await conn.execute("select count(*) from resets")).fetchone()
            assert row is not None
            return int(row[0])

        await shop.ready()
        for _ in range(ROUNDS):
            for name, (statements, again) in CHANGES.items():
                await order()
                await all_copied(postgres_url)
                before = await resets()
                for statement in statements:
                    await conn.execute(statement)
                began = time.monotonic()
                await order()
                if again:
                    while await resets() == before:
                        assert time.monotonic() < began + TOLD, name
                    told.setdefault(name, []).append(time.monotonic() - began)
                await order()
                await all_copied(postgres_url)
                # One is enough: each copies the table again.
                assert await resets() == before + again, name
        await shop.ready(0.5)
        await shop.ended()
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    slowest = ", ".join(f"{name} {max(times):.1f}" for name, times in told.items())
    figures(f"{ROUNDS} rounds, nothing missing in the copy; told after at most (s): {slowest}")
