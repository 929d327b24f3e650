"""A consumer that maintains a copy of a table, and copies it again after a `Reset`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import sql

from moored.postgres import Changes, Emitted, Postgres, Reset, Truncate

from .server import connected

__all__ = ["Mirror", "copy_of", "mirroring"]


class Mirror:
    """Maintains a copy of one table by the delivered changes alone."""

    def __init__(self, url: str, changes: Changes, table: str = "orders") -> None:
        self._url = url
        self._table = table
        self.rows: dict[int, str | None] = {}
        self.resets: list[str] = []
        self._task = asyncio.get_running_loop().create_task(self._follow(changes))

    async def _follow(self, changes: Changes) -> None:
        async for item in changes:
            if isinstance(item, Reset):
                self.resets.append(item.reason)
                self.rows = await copy_of(self._url, self._table)
                continue
            for change in item:
                assert not isinstance(change, Emitted)
                if isinstance(change, Truncate):
                    self.rows.clear()
                elif change.new is not None:
                    self.rows[change.new["id"]] = change.new["name"]
                elif change.old is not None:
                    self.rows.pop(change.old["id"], None)
            await item.ack()

    async def agrees(self) -> bool:
        if self._task.done():
            self._task.result()
        return self.rows == await copy_of(self._url, self._table)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def copy_of(url: str, table: str) -> dict[int, str | None]:
    async with connected(url) as conn:
        query = sql.SQL("select id, name from {}").format(sql.Identifier(table))
        return dict(await (await conn.execute(query)).fetchall())


@asynccontextmanager
async def mirroring(
    pg: Postgres, url: str, name: str = "mirror", table: str = "orders"
) -> AsyncIterator[Mirror]:
    async with pg.changes(name, tables=[table]) as changes:
        mirror = Mirror(url, changes, table)
        try:
            yield mirror
        finally:
            await mirror.close()
