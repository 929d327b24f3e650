"""Consumers of a change stream as parts of an app."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

from moored.kernel import counted, describe, first_of
from moored.postgres import Changes, Health, Postgres, Reset, Transaction
from moored.service import Part

from ._component import ComponentContext, component_part
from ._parts import PartEntry

__all__ = ["Handle", "consumer_part"]

Handle: TypeAlias = Callable[[Transaction | Reset], Awaitable[None]]


class _Consumer:
    """What a consumer has done so far, over all of its runs."""

    def __init__(self, pg: Postgres, name: str, tables: Iterable[str], handle: Handle) -> None:
        self._pg = pg
        self._name = name
        self._tables = [tables] if isinstance(tables, str) else list(tables)
        self._handle = handle
        self._handled = self._resets = 0
        self._last: str | None = None
        #: Whether the function has an item: if it has failed, it gets the same item again.
        self._in_hand = False
        #: Why it is not ready.
        self._why = "its tables are not published yet"

    async def run(self, ctx: ComponentContext) -> None:
        """Give each item to the function, and report when the consumer is ready."""
        ctx.show(self._statistics, self._explain)
        ctx.health("starting", self._why)  # first, because the items may be here already
        failed = self._in_hand
        try:
            async with aclosing(self._pg.changes(self._name, tables=self._tables)) as items:
                consuming = self._consume(ctx, items)
                await (consuming if failed else first_of(consuming, self._become_ready(ctx)))
        except Exception as error:
            self._why = describe(error)
            raise

    async def _consume(self, ctx: ComponentContext, items: Changes) -> None:
        failed = self._in_hand
        async for item in items:
            self._in_hand = True
            await self._handle(item)
            if isinstance(item, Reset):
                self._resets += 1
            else:
                await item.ack()
                self._handled, self._last = self._handled + 1, str(item.position)
            self._in_hand = False
            ctx.healthy()
            if failed:
                failed = False
                ctx.health("active", "")

    async def _become_ready(self, ctx: ComponentContext) -> None:
        if self._tables:
            await self._pg.wait_until_published(*self._tables, timeout=math.inf)
        else:
            await self._pg.wait_until_active()
        ctx.healthy()
        ctx.health("active", "")
        await asyncio.Event().wait()

    def _statistics(self) -> dict[str, Any]:
        return {"transactions": self._handled, "resets": self._resets, "acknowledged": self._last}

    def _explain(self) -> str:
        now = self._pg.statistics()["consumers"].get(self._name, {})
        done = f"{counted(self._handled, 'transaction')} and {counted(self._resets, 'reset')}"
        lines = [f"handled {done}"]
        if self._last is not None:
            lines.append(f"everything up to {self._last} is acknowledged")
        if number := now.get("outstanding"):
            lines.append(f"{counted(number, 'received transaction')} to acknowledge")
        if now.get("unpublished"):
            lines.append(f"the tables {', '.join(now['unpublished'])} are not published yet")
        if self._pg.health is not Health.ACTIVE:
            lines.append(f"the stream is {self._pg.health.value}")
        return "\n".join(f"  because  {each}" for each in lines)


def consumer_part(
    entry: PartEntry, pg: Postgres, consumer: str, tables: Iterable[str], handle: Handle
) -> Part:
    """Return a part that calls a function for each transaction, and then acknowledges it.

    It is ready when its tables are published: earlier changes are not received. After a failure of
    the function, it is ready when the function has handled the same item.
    """
    consuming = _Consumer(pg, consumer, tables, handle)
    return component_part(entry, consuming.run, assumed=None, shutdown=30.0)
