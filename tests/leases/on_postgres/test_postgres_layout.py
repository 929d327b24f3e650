"""The tables of the Postgres store: created once, or reported with their DDL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.leases.conformance import request
from tests.leases.on_postgres.support import Database, refusal, rows

from moored.kernel import Clock
from moored.leases import StoreMisconfigured
from moored.leases.postgres import PostgresStore, ddl, grants
from moored.leases.postgres import open_store as open_postgres


async def test_twenty_concurrent_opens_create_one_layout(
    postgres_url: str, database: Database
) -> None:
    stores = [open_postgres(postgres_url, clock=Clock.current()) for _ in range(20)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.close() for store in stores))
    found = rows(database, "select tablename from pg_tables where schemaname = 'moored'")
    assert {name for (name,) in found} == {"leases", "fences", "rates", "guards"}


async def test_the_tables_are_created_in_the_configured_schema(
    postgres_url: str, database: Database
) -> None:
    store = open_postgres(f'{postgres_url}?schema=My "leases"', clock=Clock.current())
    assert await store.acquire(request()) is not None
    await store.close()
    assert rows(database, 'select count(*) from "My ""leases""".leases') == [(1,)]


async def test_leases_in_two_schemas_are_independent(postgres_url: str) -> None:
    stores = [
        open_postgres(f"{postgres_url}?schema={name}", clock=Clock.current()) for name in "ab"
    ]
    for store in stores:
        assert await store.acquire(request()) is not None
        await store.close()


async def test_a_role_without_create_is_told_the_ddl_to_run(role: str, database: Database) -> None:
    error = await refusal(role)
    assert isinstance(error, StoreMisconfigured)
    told = str(error).partition("must run:\n")[2]
    assert told.startswith(ddl())
    database.execute(told.encode())
    store = open_postgres(role, clock=Clock.current())
    assert await store.acquire(request()) is not None
    await store.close()


async def test_a_role_without_privileges_is_told_the_grants_to_run(
    role: str, store: PostgresStore, database: Database
) -> None:
    error = await refusal(role)
    assert isinstance(error, StoreMisconfigured)
    told = str(error).partition("must run:\n")[2]
    assert told == grants(f"app_{database.info.dbname}")
    database.execute(told.encode())
    allowed = open_postgres(role, clock=Clock.current())
    wanted = request()
    assert await allowed.acquire(wanted) is not None
    assert list(await allowed.renew([wanted])) == [True]
    assert (await allowed.take("connects", rate=1.0, burst=1, tokens=1)).granted == 1
    assert list(await allowed.release([wanted])) == [True]
    await allowed.close()


async def test_missing_tables_are_created(store: PostgresStore, database: Database) -> None:
    database.execute("drop table moored.rates, moored.guards")
    name = database.info.dbname
    url = f"postgresql://{database.info.user}:{database.info.password}@127.0.0.1"
    again = open_postgres(f"{url}:{database.info.port}/{name}", clock=Clock.current())
    await again.open()
    await again.close()
    assert rows(database, "select count(*) from moored.rates") == [(0,)]


def test_the_layout_in_the_docs_is_the_layout() -> None:
    page = Path(__file__).parents[3] / "docs" / "howto" / "leases-postgres.md"
    text = page.read_text()
    assert f"```sql\n{ddl()}\n```" in text
    assert f"```sql\n{grants('app')}\n```" in text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://db/orders?shema=a", "shema"),
        ("postgresql://db/orders?timeout=soon&connections=0", "timeout='soon'"),
        ("postgresql://db/orders?timeout=soon&connections=0", "connections='0'"),
        ("postgresql://db/orders?schema=", "schema is empty"),
    ],
)
def test_one_error_lists_the_mistakes_in_a_url(url: str, words: str) -> None:
    with pytest.raises(StoreMisconfigured) as caught:
        open_postgres(url, clock=Clock.system())
    assert words in str(caught.value)


def test_the_url_is_shown_without_its_secrets() -> None:
    url = "postgresql://app:hidden@db/orders?schema=shop&sslmode=require"
    store = open_postgres(url, clock=Clock.system())
    assert repr(store) == "<PostgresStore db/orders, schema shop>"
    assert "hidden" not in repr(store._config)
    assert "sslmode=require" in store._config.conninfo
