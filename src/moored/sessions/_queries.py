"""Questions to the server that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from ._errors import QueryFailed

__all__ = ["Queries"]


class Queries:
    """The questions of one link; all of them end with it."""

    __slots__ = ("_numbers", "_waiting", "late")

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        #: Answers to nobody's question.
        self.late = 0

    def ask(self, generation: int) -> tuple[str, asyncio.Future[Any]]:
        """A new question: its id, and the future of its answer."""
        id = f"q{generation}.{next(self._numbers)}"
        future = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        return id, future

    def answered(self, id: str, value: Any, code: object) -> None:
        """An answer has come."""
        future = self._waiting.pop(id, None)
        if future is None or future.done():
            self.late += 1
        elif code is None:
            future.set_result(value)
        else:
            future.set_exception(QueryFailed(f"the server answered with an error: {code}", code))

    def forget(self, id: str) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(id, None)

    def lost(self, reason: str) -> None:
        """The link is gone: so are all answers."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(
                    QueryFailed(f"the link was lost before the server answered: {reason}")
                )

    def __len__(self) -> int:
        return len(self._waiting)
