"""Many conditional updates in few requests.

`BatchExecuteStatement` takes 25 statements that have nothing to do with each other: each one's
condition holds or not for itself, each costs what a single update costs. A transaction takes 100,
but one failed condition cancels all of them, and each costs twice as much.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from moored.kernel import Backoff

from ._errors import BUSY_STATEMENT, unavailable
from ._table import DynamoTable

__all__ = ["Statement", "update_all"]

#: DynamoDB's own limit.
_STATEMENTS = 25
#: How many batches are under way at once: enough to hide the round trip, few for the table.
_AT_ONCE = 4
_ATTEMPTS = 6


class Statement(NamedTuple):
    """One conditional update of one item."""

    #: The item's key: no two statements of a batch may be about the same item.
    item: tuple[str, ...]
    text: str
    parameters: tuple[dict[str, str], ...]

    def arguments(self) -> dict[str, Any]:
        """The statement, as a request wants it."""
        return {"Statement": self.text, "Parameters": list(self.parameters)}


async def update_all(table: DynamoTable, statements: Sequence[Statement]) -> list[bool]:
    """Run all statements; True for each whose condition held, in their order."""
    answers: list[bool | None] = [None] * len(statements)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def run(batch: Sequence[int]) -> None:
        async with turns:
            held = await _run(table, [statements[n] for n in batch])
        for n, answer in zip(batch, held, strict=True):
            answers[n] = answer

    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for batch in _batches(statements):
                group.create_task(run(batch))
    except ExceptionGroup as failed:
        failure = failed.exceptions[0]  # they all say the same: the table cannot be used
    if failure is not None:
        raise failure
    return [bool(answer) for answer in answers]


async def _run(table: DynamoTable, statements: Sequence[Statement]) -> list[bool]:
    """One batch; statements that came at a busy moment are sent again, without the others."""
    answers = [False] * len(statements)
    left = list(range(len(statements)))
    backoff = Backoff(0.025, 1.0, jitter="full", clock=table.link.clock)
    for _ in range(_ATTEMPTS):
        codes = await table.execute([statements[n].arguments() for n in left])
        for n, code in zip(left, codes, strict=True):
            answers[n] = not code
        left = [n for n, code in zip(left, codes, strict=True) if code in BUSY_STATEMENT]
        if not left:
            return answers
        table.link.retries += 1
        await asyncio.sleep(backoff.fail())
    raise unavailable(
        table.config, f"{len(left)} of {len(statements)} updates were throttled {_ATTEMPTS} times"
    )


def _batches(statements: Sequence[Statement]) -> Iterator[list[int]]:
    """The statements' numbers in batches, with no item twice in one."""
    seen: Counter[tuple[str, ...]] = Counter()
    rounds: dict[int, list[int]] = {}
    for n, statement in enumerate(statements):
        rounds.setdefault(seen[statement.item], []).append(n)
        seen[statement.item] += 1
    for numbers in rounds.values():
        for start in range(0, len(numbers), _STATEMENTS):
            yield numbers[start : start + _STATEMENTS]
