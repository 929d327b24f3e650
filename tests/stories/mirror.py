"""Keep a mirror of the table orders in SQLite, and fail if a row or a change comes twice.

python mirror.py URL STATE_DIR FILE
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from moored.postgres import Change, Postgres, Reset, Rows, Transaction

TABLES = """
create table if not exists orders (id int primary key, item text);
create table if not exists progress (one int primary key, position text);
create table if not exists resets (reason text);
"""


def apply(mirror: sqlite3.Connection, item: Rows | Transaction | Reset) -> None:
    """Store an effect and its position: both, or neither."""
    mirror.execute("begin")
    if isinstance(item, Reset):
        mirror.execute("delete from orders")
        mirror.execute("delete from progress")
        mirror.execute("insert into resets values (?)", [item.reason])
    else:
        if isinstance(item, Rows):
            mirror.executemany("insert into orders values (:id, :item)", item)
        else:
            for change in item:
                assert isinstance(change, Change)
                before = change.old or (change.new if change.kind == "update" else None)
                if before is not None:
                    done = mirror.execute("delete from orders where id = :id", before)
                    assert done.rowcount == 1, change
                if change.new is not None:
                    mirror.execute("insert into orders values (:id, :item)", change.new)
        mirror.execute("insert or replace into progress values (1, ?)", [str(item.position)])
    mirror.execute("commit")


async def main(url: str, state_dir: str, file: str) -> None:
    mirror = sqlite3.connect(file, isolation_level=None)
    mirror.execute("pragma journal_mode = wal")
    mirror.executescript(TABLES)
    stored = mirror.execute("select position from progress").fetchone()
    async with Postgres(url, state_dir=state_dir, pool_size=2) as pg:
        start = stored and stored[0]
        async for item in pg.follow("orders", consumer="mirror", chunk_rows=50, start=start):
            apply(mirror, item)
            if not isinstance(item, Reset):
                await item.ack()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
