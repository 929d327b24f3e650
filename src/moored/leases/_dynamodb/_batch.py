"""Many conditional updates in few requests.

`BatchExecuteStatement` takes 25 independent statements: each has its own condition, and costs as
much as a single update. A transaction takes 100, but one failed condition cancels all of them, and
each costs twice as much.
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

#: Statements in one batch: DynamoDB's limit.
_STATEMENTS = 25
#: Concurrent batches.
_AT_ONCE = 4
#: Attempts for a throttled statement.
_ATTEMPTS = 6


class Statement(NamedTuple):
    """One conditional update of one item."""

    #: The key of the item; DynamoDB refuses batches that update an item twice.
    item: tuple[str, ...]
    text: str
    parameters: tuple[dict[str, str], ...]

    def arguments(self) -> dict[str, Any]:
        """Return the statement in the form of a request."""
        return {"Statement": self.text, "Parameters": list(self.parameters)}


async def update_all(table: DynamoTable, statements: Sequence[Statement]) -> list[bool]:
    """Run all statements; True for each whose condition held, in their order."""
    answers = [False] * len(statements)
    semaphore = asyncio.Semaphore(_AT_ONCE)

    async def run(batch: Sequence[int]) -> None:
        async with semaphore:
            held = await _run(table, [statements[n] for n in batch])
        for n, answer in zip(batch, held, strict=True):
            answers[n] = answer

    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for batch in _batches(statements):
                group.create_task(run(batch))
    except ExceptionGroup as failed:
        failure = failed.exceptions[0]  # the errors are alike: the table cannot be used
    if failure is not None:
        raise failure
    return answers


async def _run(table: DynamoTable, statements: Sequence[Statement]) -> list[bool]:
    """Run one batch; throttled statements are sent again, without the others."""
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
    """Yield the statements' positions in batches, with no item twice in one."""
    seen: Counter[tuple[str, ...]] = Counter()
    rounds: dict[int, list[int]] = {}
    for n, statement in enumerate(statements):
        rounds.setdefault(seen[statement.item], []).append(n)
        seen[statement.item] += 1
    for numbers in rounds.values():
        for start in range(0, len(numbers), _STATEMENTS):
            yield numbers[start : start + _STATEMENTS]
