"""A copy of a table, made of what a follower delivers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.rows import dict_row

from moored.postgres import UNCHANGED, Change, Reset, Rows, Transaction, Truncate

__all__ = ["Copy", "contents"]

Row = dict[str, Any]


class Copy:
    """Applies items to rows in memory.

    :param exact: each change must fit to the rows: nothing is delivered twice.
    """

    def __init__(self, *key: str, exact: bool = False) -> None:
        self._key = key
        self._exact = exact
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.resets: list[str] = []
        self.copied = 0

    def apply(self, item: Rows | Transaction | Reset) -> None:
        if isinstance(item, Reset):
            self.resets.append(item.reason)
            self.rows.clear()
        elif isinstance(item, Rows):
            self.add(item)
        else:
            for change in item:
                self._change(change)

    def add(self, rows: Iterable[Row]) -> None:
        """Write the rows of a snapshot."""
        for row in rows:
            self._write(self._of(row), row)
            self.copied += 1

    def _change(self, change: Any) -> None:
        if isinstance(change, Truncate):
            self.rows.clear()
            return
        assert isinstance(change, Change)
        old, new = change.old, change.new
        # Of a row that stays, too: its large values may be unchanged.
        before = old if old is not None else new if change.kind == "update" else None
        removed = {} if before is None else self._remove(self._of(before))
        if new is not None:
            row = {k: removed.get(k) if v is UNCHANGED else v for k, v in new.items()}
            self._write(self._of(row), row)

    def _of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def _remove(self, key: tuple[Any, ...]) -> Row:
        assert not self._exact or key in self.rows, f"{key} is not there"
        return self.rows.pop(key, {})

    def _write(self, key: tuple[Any, ...], row: Row) -> None:
        assert not self._exact or key not in self.rows, f"{key} is there already"
        self.rows[key] = row

    def differences(self, truth: dict[tuple[Any, ...], Row]) -> list[Any]:
        """Return the rows that differ; a column that was added later may be missing."""
        found = []
        for key in self.rows.keys() | truth.keys():
            mine, theirs = self.rows.get(key), truth.get(key)
            if mine is None or theirs is None or any(mine.get(k) != v for k, v in theirs.items()):
                found.append((key, mine, theirs))
        return found


async def contents(url: str, table: str, *key: str, where: str = "true") -> dict[Any, Row]:
    """Return the rows of a table, by their keys."""
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as conn:
        rows = await (
            await conn.execute(f"select * from {table} where {where}".encode())
        ).fetchall()
    return {tuple(row[name] for name in key): row for row in rows}
