"""The programs of the pages run, with the address of a real server in place of the page's.

The pages assume some names, such as an open pool: `assumed` has them. Tutorials are read by
`test_tutorials`.
"""

from __future__ import annotations

import ast
import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import prometheus_client
import psycopg
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from starlette.responses import JSONResponse
from tests.leases.redis_server import RedisServer
from tests.servers import require_server

import moored.kernel
from moored import broker, embedded, postgres, reservoir
from moored.broker.redis import RedisEvents
from moored.kernel import Tasks
from moored.leases import connect
from moored.postgres import Gap, Outbox, Postgres
from moored.reservoir import AsyncConnectionPool
from moored.reservoir.sqlalchemy import create_engine

from .pages import ROOT, Names, all_blocks, page, run

#: The pages whose programs another test runs.
RUN_ELSEWHERE = {
    "howto/django-langgraph-procrastinate": "tests/reservoir/test_psycopg_pool_install.py",
    "howto/grpc-fastapi": "tests/rpc/test_docs.py",
    "howto/moving-primary": "tests/rpc/test_docs.py",
    "howto/mqtt": "tests/sessions/test_docs.py",
    "howto/sessions-cluster": "tests/sessions/test_docs.py",
    "howto/test-a-bot": "tests/sessions/test_docs.py",
    "howto/write-a-protocol": "tests/sessions/test_docs.py",
    "topics/four-outcomes": "tests/sessions/test_docs.py",
    "topics/rpc": "tests/rpc/test_docs.py",
    "topics/sessions": "tests/sessions/test_docs.py",
    "tutorial/follow-a-table": "tests/postgres/test_docs.py",
}
#: The pages whose programs are compiled and not run, and why.
COMPILED = {
    "howto/milvus": "they need a Milvus; tests/rpc/test_milvus.py uses the same clients",
    "operations/deployment": "it traces the whole process",
    "topics/effectively-once": "they do not end; examples/effectively_once.py is run",
}
#: The other pages, and what is replaced in their programs. The addresses are replaced in all.
PAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "README": (),
    "howto/app": (),
    "howto/aurora-dsql": (("retry_transaction(pool,", "retry_transaction(open_pool,"),),
    "howto/doctor": (),
    "howto/embedded-postgres": (('"/srv/orders/postgres"', "None"),),
    "howto/fault-proxy": (
        ('"127.0.0.1", 5432', '"127.0.0.1", port'),
        ("host=proxy.host, port=proxy.port", "conninfo, port=proxy.port"),
    ),
    "howto/leases-dynamodb": (
        ("dynamodb://leases?region=eu-central-1", "memory://"),
        ("dynamodb://leases?endpoint_url=http://127.0.0.1:8000", "memory://"),
    ),
    "howto/leases-postgres": (
        ("leases.exclusive(", "open_leases.exclusive("),
        ("insert into report …", "insert into report values ('tea')"),
    ),
    "howto/leases-redis": (
        ("leases.exclusive(", "open_leases.exclusive("),
        ("redis://cache/0?prefix=shop", "{redis}"),
    ),
    "howto/live-events": (
        ('"/etc/shop/api-keys"', '{"key": "acme"}'),
        ("redis://cache", "{redis}"),
    ),
    "howto/move-from-asyncpg": (),
    "howto/move-from-psycopg-pool": (("insert into orders values (1)", "select 1"),),
    "howto/outbox": (("async for batch in outbox.tail(cursor):", "if cursor:"),),
    "howto/pgbouncer-in-front": (),
    "howto/postgres-neon": (),
    "howto/postgres-rds": (),
    "howto/postgres-self-hosted": (),
    "howto/postgres-supabase": (),
    "howto/rds-iam": (("/etc/ssl/rds/global-bundle.pem", "{authorities}"),),
    "howto/several-services-one-limit": (("redis://cache", "memory://"),),
    "howto/sqlalchemy": (("open(wait=True) ", "statistics() "),),
    "operations/metrics": (),
    "operations/postgres": (),
    "operations/reservoir": (),
    "operations/service": (),
    "reference/reservoir-configuration": (),
    "topics/leases": (("redis://cache", "memory://"),),
    "topics/listeners": (("            ...", "            break"),),
    "topics/reservoir": (("insert into orders values (1)", "select 1"),),
    "topics/snapshots": (
        ("        ...", "        pass"),
        ("await item.ack()", "await item.ack(); break"),
        ("\nset_json_loads(", "\n_ = ("),  # of the whole process; tests/snapshot/test_json_null.py
    ),
}


DOCUMENTS = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]


def programs(name: str) -> list[str]:
    """Return the programs of a page, without those that a reader saves or types."""
    found = [each for each in all_blocks(page(name)) if each.language == "python"]
    return [each.text for each in found if not each.caption and ">>>" not in each.text]


def test_every_page_with_programs_is_known() -> None:
    names = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in DOCUMENTS}
    assert {name for name in (*names, "README") if programs(name)} == {
        *PAGES,
        *RUN_ELSEWHERE,
        *COMPILED,
    }
    for name, test in RUN_ELSEWHERE.items():
        assert name in (ROOT / test).read_text()


@pytest.mark.parametrize("name", COMPILED)
def test_programs_compile(name: str) -> None:
    for program in programs(name):
        compile(program, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


class Table(DeclarativeBase):
    """The base of the reader's tables."""


class Order(Table):
    """An order in SQLAlchemy."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str | None]
    price: Mapped[int | None]
    article: Mapped[str | None]


async def nothing(*_: object, **__: object) -> None:
    """A function of the reader's."""


async def notify_often(pool: AsyncConnectionPool[Any]) -> None:
    """Notify a channel, so that a program that waits for an event gets one."""
    while True:
        async with pool.connection() as conn:
            await conn.execute("select pg_notify('orders', 'tea')")
        await asyncio.sleep(0.05)


async def update_often(pool: AsyncConnectionPool[Any]) -> None:
    """Update a row, so that a program that waits for a transaction gets one."""
    while True:
        async with pool.connection() as conn:
            await conn.execute("update orders set price = price + 1")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def database(url: str) -> AsyncIterator[AsyncConnectionPool[Any]]:
    """Create the tables of the pages, and yield a pool; close what the programs have opened."""
    async with AsyncConnectionPool(url, max_size=4) as pool:
        async with pool.connection() as conn:
            for statement in (
                "create table orders (id serial primary key, state text, price int, article text)",
                "insert into orders values (7, 'new', 3, 'tea')",
                "create table accounts (id int, balance int)",
                "insert into accounts values (42, 10)",
                "create table report (line text)",
            ):
                await conn.execute(statement)
        yield pool


@asynccontextmanager
async def assumed(url: str, directory: Path, redis: str, text: str) -> AsyncIterator[Names]:
    """Yield the names that the programs of a page assume; what is slow, only if the text has it."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(database(url))
        conn = await psycopg.AsyncConnection.connect(url)
        stack.push_async_callback(conn.close)
        names: Names = {
            **vars(moored.kernel),
            **vars(postgres),
            **vars(reservoir),
            **vars(embedded),
            **vars(broker),
            "asyncio": asyncio,
            "pytest": pytest,
            "psycopg": psycopg,
            "prometheus_client": prometheus_client,
            "asynccontextmanager": asynccontextmanager,
            "FastAPI": FastAPI,
            "JSONResponse": JSONResponse,
            "Session": Session,
            "AsyncSession": AsyncSession,
            "Order": Order,
            "RedisEvents": RedisEvents,
            "public_key": "",
            "broker": broker.Broker(broker.MemorySource(), channels=["orders"]),
            "events": broker.MemorySource(),
            "pool": pool,
            "open_pool": pool,
            "conn": conn,
            "conninfo": url,
            "port": urlsplit(url).port,
            "payload": "tea",
            "event": Gap(since=0.0, reason="a test"),
            "URL": url,
            "DATABASE_URL": url,
            "NOTIFY_URL": url,
            "PROCESSES": 4,
            "cursor": None,
            "line": "tea",
            "text": "tea",
            "lamp_app": None,
            **dict.fromkeys(("write_report", "reload_orders", "handle", "write"), nothing),
        }
        if "leases.exclusive" in text:
            leases = connect(redis if "leases.redis" in text else url)
            names["open_leases"] = await stack.enter_async_context(leases)
            names["client"] = Redis.from_url(redis)
            stack.push_async_callback(names["client"].aclose)
        if "pg." in text or "(pg)" in text:
            pg = Postgres(url, state_dir=directory / "state", pool_size=2)
            names["pg"] = await stack.enter_async_context(pg)
        tasks = Tasks()
        stack.push_async_callback(tasks.cancel)
        if "listener.subscribe" in text:
            tasks.start(notify_often(pool))
        if "pg.follow" in text:
            tasks.start(update_often(pool))
        if "outbox.publish" in text:
            await stack.enter_async_context(Outbox(url, install=True))
            engine = names["engine"] = create_engine(url)
            stack.callback(engine.dispose)
            async_engine = names["async_engine"] = create_async_engine(asyncpg_of(url))
            stack.push_async_callback(async_engine.dispose)
        yield names


def asyncpg_of(url: str) -> str:
    return url.replace("postgresql://", "postgresql+asyncpg://")


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer(require_server("redis")) as server:
        yield server.url


@pytest.mark.parametrize("name", PAGES)
async def test_programs_of_the_page_run(
    name: str, postgres_url: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    everywhere = [
        ("postgresql+asyncpg://app@db/orders", asyncpg_of(postgres_url)),
        *((f"postgresql://app@db/{each}", postgres_url) for each in ("orders", "shop", "app")),
        ("postgresql://direct:5432/app", postgres_url),
        ("(...,", f'("{postgres_url}",'),
        ("(\n    ...,", f'("{postgres_url}",'),
    ]
    text = "\n".join(programs(name))
    authorities = ssl.get_default_verify_paths().cafile or ""
    async with assumed(postgres_url, tmp_path, redis, text) as names, asyncio.timeout(60):
        for program in programs(name):
            for old, new in (*PAGES[name], *everywhere):
                new = new.replace("{redis}", redis).replace("{authorities}", authorities)
                program = program.replace(old, new)
            await run(program, names)
        await close_all(names)
    assert all(old in text for old, _ in PAGES[name]), "a replacement is not needed any more"


async def close_all(names: Names) -> None:
    """Close the pools and connections that the programs have left open."""
    for value in names.values():
        if isinstance(value, AsyncConnectionPool | psycopg.AsyncConnection):
            await value.close()
