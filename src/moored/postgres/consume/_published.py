"""Which tables are published by now, for those who wait for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection, Iterable

from ._consumer import Changes

__all__ = ["Published"]


class Published:
    """The tables that were found to be published, and the consumers that cannot have theirs."""

    def __init__(self) -> None:
        self._tables: set[str] = set()
        #: Those who were refused, until they are closed, or come back.
        self._refused: weakref.WeakSet[Changes] = weakref.WeakSet()
        self._news = asyncio.Event()

    def add(self, tables: Iterable[str]) -> None:
        """These tables are published."""
        self._tables.update(tables)
        self._news.set()

    def remove(self, tables: Iterable[str]) -> None:
        """These tables are not published, or not any more."""
        self._tables.difference_update(tables)

    def clear(self) -> None:
        """Nothing is known to be published."""
        self._tables.clear()

    def refuse(self, changes: Changes) -> None:
        """A consumer cannot have its tables."""
        self._refused.add(changes)
        self._news.set()

    def came(self, name: str) -> None:
        """A consumer of this name tries it again."""
        for changes in [each for each in self._refused if each.name == name]:
            self._refused.discard(changes)

    def closed(self, changes: Changes) -> None:
        """A consumer has gone."""
        self._refused.discard(changes)

    async def wait(
        self, tables: Collection[str], consumers: Callable[[], Iterable[Changes]]
    ) -> None:
        """Wait until these tables are published, or all that the consumers want.

        Raises the error of a consumer that cannot have them.
        """
        while True:
            wanted = set(tables) or {name for each in consumers() for name in each.tables}
            for each in self._refused:
                missing = set(each.tables) - self._tables
                if each._error is not None and (not tables or missing & wanted):
                    raise each._error
            if wanted <= self._tables:
                return
            self._news.clear()
            await self._news.wait()
