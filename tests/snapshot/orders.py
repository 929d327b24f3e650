"""The table `orders`, and what a test reads of a follower."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.postgres.conftest import Sql

from moored.postgres import Follow, Reset, Rows

__all__ = ["CREATE", "LIMIT", "ROWS", "column", "copied", "item_of"]

LIMIT = 60.0
ROWS = 50
CREATE = f"""
create table orders (id int primary key, name text, price numeric);
insert into orders select n, 'order ' || n, n * 1.5 from generate_series(1, {ROWS}) n;
analyze orders
"""


async def column(conn: Sql, query: str) -> list[Any]:
    """Return the values of a query."""
    return [value for (value,) in await (await conn.execute(query.encode())).fetchall()]


async def item_of(follow: Follow) -> Any:
    """Return the next item."""
    return await asyncio.wait_for(anext(follow), LIMIT)


async def copied(follow: Follow, *, resets: bool = False) -> list[Any]:
    """Acknowledge the rows, and return their ids; a `Reset`, if one is allowed, begins again."""
    found: list[Any] = []
    while not follow.progress.complete:
        item = await item_of(follow)
        if resets and isinstance(item, Reset):
            found.clear()
            continue
        assert isinstance(item, Rows), item
        found += [row["id"] for row in item]
        await item.ack()
    return found
