"""A follower in a separate process that maintains a copy in SQLite, so that it can be killed.

`python follow_program.py CONFIG` follows the table `items` until it is killed. CONFIG is JSON:
`url`, `state_dir`, `path` (the copy) and `exact`: store the position with each effect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import sys
from typing import Any

import moored.postgres.manage._stack as _stack
from moored.postgres import RESUME, UNCHANGED, Change, Postgres, Reset, Rows, Transaction

__all__: list[str] = []

COLUMNS = ("id", "amount", "state", "body")


class SqliteCopy:
    """The rows, the position, and how often a row was written that existed already."""

    def __init__(self, path: str, *, exact: bool) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._exact = exact
        self._database.executescript(
            "pragma journal_mode = wal; pragma synchronous = normal;"
            "create table if not exists items (id int primary key, amount int, state text, "
            "  body text) without rowid;"
            "create table if not exists position (one int primary key, value text);"
        )

    @property
    def position(self) -> str | None:
        row = self._database.execute("select value from position").fetchone()
        return None if row is None else str(row[0])

    def apply(self, item: Rows | Transaction | Reset) -> None:
        do = self._database.execute
        do("begin immediate")
        if isinstance(item, Reset):
            do("delete from items")
            do("delete from position")
        else:
            if isinstance(item, Rows):
                for row in item:
                    self._insert(row)
            else:
                for change in item:
                    self._change(change)
            do("insert or replace into position values (1, ?)", (str(item.position),))
        do("commit")

    def _change(self, change: Any) -> None:
        if change.kind == "truncate":
            self._database.execute("delete from items")
            return
        assert isinstance(change, Change)
        old, new = change.old, change.new
        before = {}
        if change.kind != "insert":
            key = (old or new or {})["id"]
            found = self._database.execute("select * from items where id = ?", (key,)).fetchone()
            assert not self._exact or found is not None, f"{key} is not there"
            before = dict(zip(COLUMNS, found or [None] * len(COLUMNS), strict=True))
            self._database.execute("delete from items where id = ?", (key,))
        if new is not None:
            self._insert({k: before[k] if v is UNCHANGED else v for k, v in new.items()})

    def _insert(self, row: dict[str, Any]) -> None:
        how = "insert" if self._exact else "insert or replace"
        values = [row[name] for name in COLUMNS]
        self._database.execute(f"{how} into items values (?, ?, ?, ?)", values)


async def main(config: dict[str, Any]) -> None:
    copy = SqliteCopy(config["path"], exact=config["exact"])
    async with Postgres(
        config["url"], state_dir=config["state_dir"], pool_size=2, stream_id="killed"
    ) as pg:
        start = copy.position if config["exact"] else RESUME
        follow = pg.follow("items", consumer="c", chunk_rows=5, start=start)
        async for item in follow:
            copy.apply(item)
            sys.stdout.write("item\n")
            sys.stdout.flush()
            if not isinstance(item, Reset):
                await item.ack()


if __name__ == "__main__":
    _stack.BACKOFF = (0.05, 0.5)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    asyncio.run(main(json.loads(sys.argv[1])))
