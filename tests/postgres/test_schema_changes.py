"""Changes of columns that leave the rows as they are: `SchemaChanged`, and an event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moored.postgres import Changes, Postgres, Reset, SchemaChanged, Transaction
from moored.postgres.consume._schema_changes import altered
from moored.postgres.manage import _manager
from moored.postgres.server import DROP_SCHEMA_TRIGGER, SCHEMA_TRIGGER

from .conftest import MakePostgres, Sql
from .server import LIMIT, following, ids, until

#: Three times as long as documented: other processes may keep the machine busy.
TOLD = 9.0
ALTERED = (
    "alter table orders add note varchar(20), add total numeric(10, 2)",
    "alter table orders rename name to title",
    "alter table orders alter note type varchar(40)",
    "alter table orders drop total",
)


async def next_item(changes: Changes[SchemaChanged]) -> Transaction | Reset | SchemaChanged:
    return await asyncio.wait_for(anext(changes), TOLD)


def followed(pg: Postgres, *columns: str) -> Callable[[], Awaitable[bool]]:
    """Whether a consumer follows a table with these columns."""

    async def so() -> bool:
        table = pg._hub.tables.of("c").get("orders")
        known = {} if table is None else dict(table.columns or {})
        return {name for name, *_ in known.values()} == set(columns)

    return so


async def test_a_consumer_that_wants_them_is_told_of_changed_columns_within_seconds(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("c", tables=["orders"], schema_changes=True)
        other = pg.changes("other", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        expected = [
            SchemaChanged(
                "public.orders",
                added={"note": "character varying(20)", "total": "numeric(10,2)"},
            ),
            SchemaChanged("public.orders", renamed={"name": "title"}),
            SchemaChanged(
                "public.orders",
                retyped={"note": ("character varying(20)", "character varying(40)")},
            ),
            SchemaChanged("public.orders", dropped=("total",)),
        ]
        for number, statement in enumerate(ALTERED):
            await sql.execute(statement.encode())
            assert await next_item(changes) == expected[number]
            # Emitted before the item is delivered, and once for both consumers.
            events = [each.detail for each in pg.last_events if each.name == "schema_changed"]
            assert events == [str(each) for each in expected[: number + 1]]
        assert events[1] == "columns of public.orders: name was renamed to title"
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(other)) == [1]


async def test_a_consumer_that_was_away_is_told_of_changed_columns_when_it_attaches(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.changes("c", tables=["orders"]):
            await pg.wait_until_published(timeout=LIMIT)
            await until(followed(pg, "id", "name"))
        for statement in ALTERED:
            await sql.execute(statement.encode())
    async with make() as pg, pg.changes("c", tables=["orders"], schema_changes=True) as changes:
        assert await next_item(changes) == SchemaChanged(
            "public.orders", added={"note": "character varying(40)"}, renamed={"name": "title"}
        )


async def test_columns_that_change_the_rows_are_a_reset_and_nothing_else(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("c", tables=["orders"], schema_changes=True)
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("alter table orders add price int default 5")
        assert isinstance(await next_item(changes), Reset)
        await sql.execute("insert into orders values (1, 'x')")
        item = await next_item(changes)
        assert isinstance(item, Transaction)
        assert ids(item) == [1]


async def test_with_the_event_trigger_the_stream_itself_tells_of_changes(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manager, "MARKER_EVERY", 3600.0)
    await sql.execute(SCHEMA_TRIGGER.encode())
    async with make(check_every=3600.0) as pg:
        changes = pg.changes("c", tables=["orders"], schema_changes=True)
        await pg.wait_until_published(timeout=LIMIT)
        for number in range(3):  # a check that was due anyway finds the first one at most
            await sql.execute(f"alter table orders add extra_{number} int".encode())
            item = await next_item(changes)
            while isinstance(item, Transaction):
                assert not list(item)  # that of the change of the schema itself
                item = await next_item(changes)
            assert item == SchemaChanged("public.orders", added={f"extra_{number}": "integer"})
        await sql.execute("select pg_logical_emit_message(true, 'app', 'not wanted')")
        await sql.execute("drop table orders; create table orders (id int primary key)")
        while isinstance(item := await next_item(changes), Transaction):
            assert not list(item)
        assert isinstance(item, Reset)
    await sql.execute(DROP_SCHEMA_TRIGGER.encode())


@pytest.mark.parametrize("before", [None, {"1": ["id", 23, -1, False]}])
def test_columns_that_were_stored_without_their_types_have_no_new_types(
    before: dict[str, list[object]] | None,
) -> None:
    assert altered("t", before, {"1": ["id", 23, -1, False, "integer"]}) is None
