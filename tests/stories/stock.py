"""The shop with three mirrors of its stock in SQLite, each with other options.

A mirror stores each effect with its position, and how many changes it was.
"""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

from tests.stories.shop import api, app, pg

from moored.app import ComponentContext
from moored.postgres import Change, Reset, Rows

__all__ = ["api"]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "columns": {"columns": ["id", "price"]},
    "where": {"where": "price % 2 = 0"},
}
TABLES = """
create table if not exists items (id int primary key, price int);
create table if not exists progress (position text primary key, changes int);
"""


async def keep(kind: str, ctx: ComponentContext) -> None:
    """Keep a mirror; it must never begin again, nor get an item twice."""
    file = Path(os.environ["STATE_DIR"], f"{kind}.mirror")
    mirror = sqlite3.connect(file, isolation_level=None)
    mirror.execute("pragma journal_mode = wal")
    mirror.executescript(TABLES)
    query = "select position from progress order by rowid desc limit 1"
    (start,) = mirror.execute(query).fetchone() or (None,)
    async for item in pg.follow("items", consumer=kind, start=start, **OPTIONS[kind]):
        assert not isinstance(item, Reset), item
        changes = 0
        mirror.execute("begin")
        if isinstance(item, Rows):
            mirror.executemany("insert into items values (:id, :price)", item)
        else:
            async for change in item:
                assert isinstance(change, Change)
                changes += 1
                if change.new is not None:
                    mirror.execute("insert or replace into items values (:id, :price)", change.new)
                elif change.old is not None:
                    mirror.execute("delete from items where id = :id", change.old)
        mirror.execute("insert into progress values (?, ?)", [str(item.position), changes])
        mirror.execute("commit")
        await item.ack()


for name in OPTIONS:
    app.component(name=name, after=["postgres"], required=False)(partial(keep, name))
