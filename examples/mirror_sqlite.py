"""Keep a copy of a table in SQLite: its rows, then every change, also after a crash.

The position is stored with each effect, so that nothing is missing and nothing is applied twice.

Expected output:

    copied: [(1, 'tea'), (2, 'rice')]
    then: [(1, 'green tea'), (3, 'salt')]
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile

from moored.embedded import EmbeddedPostgres
from moored.postgres import Postgres, Reset, Rows, Transaction, Truncate

WRITE = "insert or replace into orders values (:id, :item)"


def apply(mirror: sqlite3.Connection, item: Rows | Transaction | Reset) -> None:
    with mirror:  # one transaction: the effect and the position, or neither
        if isinstance(item, Reset):  # the copy begins again: restored, truncated, altered, …
            mirror.execute("delete from orders")
        elif isinstance(item, Rows):
            mirror.executemany(WRITE, item)
        else:
            for change in item:
                if isinstance(change, Truncate):
                    mirror.execute("delete from orders")
                if change.old is not None:
                    mirror.execute("delete from orders where id = :id", change.old)
                if change.new is not None:
                    mirror.execute(WRITE, change.new)
        position = None if isinstance(item, Reset) else str(item.position)
        mirror.execute("update progress set position = ?", (position,))


async def keep(pg: Postgres, mirror: sqlite3.Connection) -> None:
    (start,) = mirror.execute("select position from progress").fetchone()
    async with pg.follow("orders", consumer="mirror", start=start) as items:
        async for item in items:
            apply(mirror, item)
            if not isinstance(item, Reset):
                await item.ack()


# -- a database to follow ------------------------------------------------------------------------


async def until(mirror: sqlite3.Connection, expected: list[tuple[int, str]]) -> None:
    while mirror.execute("select * from orders").fetchall() != expected:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def main() -> None:
    mirror = sqlite3.connect(":memory:")
    mirror.executescript(
        "create table orders (id integer primary key, item text);"
        "create table progress (position text); insert into progress values (null);"
    )
    with tempfile.TemporaryDirectory() as state:
        async with EmbeddedPostgres() as server, Postgres(server.url, state_dir=state) as pg:
            async with pg.connection() as conn:
                await conn.execute("create table orders (id int primary key, item text)")
                await conn.execute("insert into orders values (1, 'tea'), (2, 'rice')")
            keeping = asyncio.create_task(keep(pg, mirror))
            await until(mirror, copied := [(1, "tea"), (2, "rice")])
            print("copied:", copied)
            async with pg.connection() as conn:
                await conn.execute("update orders set item = 'green tea' where id = 1")
                await conn.execute("update orders set id = 3, item = 'salt' where id = 2")
            await until(mirror, then := [(1, "green tea"), (3, "salt")])
            print("then:", then)
            keeping.cancel()
            await asyncio.wait({keeping})
    mirror.close()


if __name__ == "__main__":
    asyncio.run(main())
