"""Queries to the server that wait for their answers."""

from __future__ import annotations

import asyncio
from typing import Any

from .._errors import QueryFailed

__all__ = ["Queries"]


class Queries:
    """The queries of a connection; those of a link end with it."""

    __slots__ = ("_number", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._number = 0

    def ask(self, generation: int) -> tuple[str, asyncio.Future[Any]]:
        """Register a query; returns its id, and the future of its answer."""
        self._number += 1
        id = f"q{generation}.{self._number}"
        future = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        return id, future

    def answered(self, id: str, value: Any, code: object) -> None:
        """Settle the query that an answer belongs to."""
        future = self._waiting.pop(id, None)
        if future is None or future.done():
            return
        if code is None:
            future.set_result(value)
        else:
            future.set_exception(QueryFailed(f"the server answered with an error: {code}", code))

    def forget(self, id: str) -> None:
        """Drop a query whose caller does not wait any more."""
        self._waiting.pop(id, None)

    def lost(self, reason: str) -> None:
        """Fail every query: the link is gone."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(
                    QueryFailed(f"the link was lost before the server answered: {reason}")
                )

    def __len__(self) -> int:
        return len(self._waiting)
