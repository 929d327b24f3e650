"""The queries to the server that have no answer yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from .._errors import QueryFailed

__all__ = ["Queries"]


@dataclass(slots=True, eq=False, repr=False)
class Queries:
    """The queries of a connection; they fail when their link is lost."""

    _waiting: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    _number: int = 0

    def ask(self, generation: int) -> tuple[str, asyncio.Future[Any]]:
        """Register a query; return its id and the future of its answer."""
        self._number += 1
        id = f"q{generation}.{self._number}"
        future = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        return id, future

    def answered(self, id: str, value: Any, code: object) -> None:
        """Settle the query of this id."""
        future = self._waiting.pop(id, None)
        if future is None or future.done():
            return
        if code is None:
            future.set_result(value)
        else:
            future.set_exception(QueryFailed(f"the server answered with an error: {code}", code))

    def forget(self, id: str) -> None:
        """Remove a query whose caller has stopped waiting."""
        self._waiting.pop(id, None)

    def lost(self, reason: str) -> None:
        """Fail every query: the link is lost."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(
                    QueryFailed(f"the link was lost before the server answered: {reason}")
                )

    def __len__(self) -> int:
        return len(self._waiting)
