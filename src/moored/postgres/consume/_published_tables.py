"""The published tables, for callers that wait until theirs are."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection, Iterable

from ._consumer import Changes

__all__ = ["PublishedTables"]


class PublishedTables:
    """The tables that are known to be published, and the consumers whose tables cannot be."""

    def __init__(self) -> None:
        self._tables: set[str] = set()
        #: Consumers that were refused, until they are closed or attach again.
        self._refused: weakref.WeakSet[Changes] = weakref.WeakSet()
        self._changed = asyncio.Event()

    def add(self, tables: Iterable[str]) -> None:
        """Record that these tables are published."""
        self._tables.update(tables)
        self.notify()

    def notify(self) -> None:
        """Let the waiting callers look again."""
        self._changed.set()

    def remove(self, tables: Iterable[str]) -> None:
        """Record that these tables are not published."""
        self._tables.difference_update(tables)

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()

    def refuse(self, changes: Changes) -> None:
        """Record that a consumer's tables cannot be published."""
        self._refused.add(changes)
        self.notify()

    def forget_refusal(self, name: str) -> None:
        """Forget that a consumer of this name was refused: it attaches again."""
        for changes in [each for each in self._refused if each.name == name]:
            self._refused.discard(changes)

    def closed(self, changes: Changes) -> None:
        """Forget a consumer that was closed."""
        self._refused.discard(changes)

    async def wait(
        self,
        tables: Collection[str],
        consumers: Callable[[], Iterable[Changes]],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until these tables are published; without any, all tables of the consumers.

        Raises the error of a consumer whose tables cannot be published.

        :param ready: must be true as well, and may raise; called again after each `notify()`.
        """
        while True:
            wanted = set(tables) or {name for each in consumers() for name in each.tables}
            for each in self._refused:
                missing = set(each.tables) - self._tables
                if each._error is not None and (not tables or missing & wanted):
                    raise each._error
            if ready() and wanted <= self._tables:
                return
            self._changed.clear()
            await self._changed.wait()
