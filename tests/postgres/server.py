"""Servers that a test may damage, and consumers in separate processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from tests.programs import Program

from moored.embedded import EmbeddedPostgres
from moored.postgres import Changes, Postgres, Reset, Transaction
from moored.postgres.consume._hub import Hub
from moored.postgres.manage import _manager_core, _stack
from moored.postgres.report._health import Health
from moored.postgres.server import _admin

__all__ = [
    "LIMIT",
    "ConsumerProcess",
    "confirm_all",
    "connected",
    "following",
    "ids",
    "next_reset",
    "one",
    "own_server",
    "published",
    "quicken",
    "stands_by",
    "through",
    "until",
    "walsender",
]

#: How long anything may take that takes a moment on an idle machine.
LIMIT = 30.0

Sql = psycopg.AsyncConnection[Any]


@asynccontextmanager
async def own_server(**options: str) -> AsyncIterator[EmbeddedPostgres]:
    """A server with settings of its own and a table to write to; the test may harm it."""
    async with EmbeddedPostgres(options=options) as server:
        async with connected(server.url) as conn:
            await conn.execute("create table orders (id int primary key, name text)")
        yield server


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Sql]:
    """A connection of the test's own."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True, **options) as conn:
        yield conn


def through(url: str, port: int) -> str:
    """The same URL by another port: a proxy's."""
    known = psycopg.conninfo.conninfo_to_dict(url)
    return url.replace(f":{known['port']}/", f":{port}/")


def quicken(
    monkeypatch: pytest.MonkeyPatch, *, check_every: float | None = None, quiet: float | None = None
) -> None:
    """Shorten the waits between tries, and those before something is looked at."""
    monkeypatch.setattr(_stack, "BACKOFF", (0.05, 0.5))
    if check_every is not None:
        monkeypatch.setattr(_manager_core, "CHECK_EVERY", check_every)
    if quiet is not None:
        monkeypatch.setattr(_admin, "QUIET", quiet)


async def until(condition: Callable[[], Awaitable[object]], limit: float = LIMIT) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(limit):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.02)


async def stands_by(pg: Postgres) -> None:
    """Wait until it reports that another instance has the lock."""

    async def waits() -> bool:
        return pg.health is Health.WAITING

    await until(waits)


def confirm_all(hub: Hub) -> None:
    """Where there is no publisher, every table counts as published."""
    for changes in hub.attached():
        hub._confirm(changes)


async def one(conn: Sql, query: str, *values: Any) -> Any:
    """The first column of the first row; None if there is none."""
    row = await (await conn.execute(query.encode(), values or None)).fetchone()
    return None if row is None else row[0]


async def published(url: str, stream_id: str, *tables: str) -> None:
    """Wait until the tables are in the publication: earlier changes are not received."""
    query = "select count(*) from pg_publication_tables where pubname = %s and tablename = any(%s)"
    names = list(tables or ["orders"])

    async with connected(url) as conn:

        async def there() -> bool:
            count = await one(conn, query, f"moored_publication_{stream_id}", names)
            return bool(count == len(names))

        await until(there)


async def following(changes: Changes, limit: float = LIMIT) -> Transaction:
    """The next transaction; a reset is a failure of the test."""
    item = await asyncio.wait_for(anext(changes), limit)
    assert isinstance(item, Transaction), item
    return item


async def next_reset(changes: Changes, limit: float = LIMIT) -> Reset:
    """The next item, which must be a reset."""
    item = await asyncio.wait_for(anext(changes), limit)
    assert isinstance(item, Reset), item
    return item


def ids(txn: Transaction) -> list[int]:
    """The ids of the new rows of a transaction."""
    return [change.new["id"] for change in txn if change.new is not None]


async def walsender(conn: Sql, pg: Postgres) -> int | None:
    """The backend that streams to it."""
    query = "select active_pid from pg_replication_slots where slot_name = %s"
    pid: int | None = await one(conn, query, pg.settings.slot_name)
    return pid


class ConsumerProcess:
    """A consumer in a process of its own, with one place for its state however often it is killed.

    :param kind: the name of a keeper of the program; it is the consumer's name, and the stream's
        if no other is given.
    """

    def __init__(
        self,
        url: str,
        kind: str,
        directory: Path,
        *,
        tables: tuple[str, ...] = ("orders",),
        **config: Any,
    ) -> None:
        self.kind = kind
        self.path = directory / f"{kind}.kept"
        self.log = directory / f"{kind}.log"
        self._config = {
            "url": url,
            "stream_id": kind,
            "kind": kind,
            "path": str(self.path),
            "state_dir": str(directory / f"{kind}.state"),
            "tables": tables,
            **config,
        }
        self._process: Program | None = None

    def start(self, **config: Any) -> None:
        """Start it, again or for the first time."""
        self._process = Program(
            "tests.postgres.consumer_program",
            json.dumps({**self._config, **config}),
            log=self.log,
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            with self._process:
                self._process.kill()

    async def run_to_its_end(self, **config: Any) -> int:
        """Start the process, wait until it ends by itself, and return its exit code."""
        self.start(**config)
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, LIMIT)
        finally:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended by itself, which it never should."""
        return self._process is not None and self._process.returncode is not None

    def lines(self) -> list[str]:
        """Return the lines that the process has written to its file."""
        return self.path.read_text().splitlines() if self.path.exists() else []

    def read_json(self) -> list[Any]:
        """Return the lines as values."""
        return [json.loads(line) for line in self.lines()]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
