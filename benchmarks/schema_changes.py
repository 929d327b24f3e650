"""How long after a change of a followed table, beside 39 others, is its consumer told?"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

from _harness import Report, main, spread
from moored.embedded import EmbeddedPostgres
from moored.postgres import Changes, Postgres, Reset
from moored.postgres.server import SCHEMA_TRIGGER

TABLES = 40
#: Seconds between two changes, at least: with the trigger, there is one check a second at most.
REST = {"": 0.5, "trigger_": 2.5}
CREATE = "create table orders (id int primary key)"
#: What is done to the table; no row is changed, so the stream alone shows nothing.
CHANGES = {
    "recreated": f"drop table orders; {CREATE}",
    "swapped": "alter table orders rename to o; create table orders (like o including all); "
    "drop table o",
    "left": "alter publication moored_publication_default drop table orders",
    "not_all_operations": "alter publication moored_publication_default set (publish = 'insert')",
}


@asynccontextmanager
async def consumer(url: str) -> AsyncIterator[Changes]:
    """A consumer of all tables, which are published."""
    tables = ["orders", *(f"t{number}" for number in range(1, TABLES))]
    with tempfile.TemporaryDirectory() as state:
        async with Postgres(url, state_dir=state, pool_size=3) as pg:
            async with pg.changes(tables=tables) as changes:
                await pg.wait_until_published(timeout=60)
                yield changes
            await pg.drop()


async def told(
    changes: Changes, conn: psycopg.AsyncConnection, statement: str, rest: float
) -> float:
    """Change the table; return the milliseconds until the `Reset`."""
    await asyncio.sleep(random.uniform(rest, rest + 1))  # between two queries, at any moment
    await conn.execute(statement.encode())
    begin = time.perf_counter()
    while not isinstance(await asyncio.wait_for(anext(changes), 60), Reset):
        pass
    return (time.perf_counter() - begin) * 1000


async def measured(report: Report, rounds: int) -> None:
    async with (
        EmbeddedPostgres() as server,
        await psycopg.AsyncConnection.connect(server.url, autocommit=True) as conn,
    ):
        await conn.execute(CREATE.encode())
        for number in range(1, TABLES):
            await conn.execute(f"create table t{number} (id int primary key, a text)".encode())
        for how, rest in REST.items():
            if how:
                await conn.execute(SCHEMA_TRIGGER.encode())
            async with consumer(server.url) as changes:
                for name, statement in CHANGES.items():
                    found = [await told(changes, conn, statement, rest) for _ in range(rounds)]
                    report.add(f"{how}{name}_told_ms", spread(found, "ms"))


def measure(report: Report, quick: bool) -> None:
    asyncio.run(measured(report, 2 if quick else 10))
    report.notes.append(f"{TABLES} tables; from the statement's end to the Reset")


if __name__ == "__main__":
    logging.getLogger("moored").setLevel(logging.ERROR)  # each Reset is a warning
    main("schema_changes", __doc__ or "", measure)
