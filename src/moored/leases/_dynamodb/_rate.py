"""Rate limits in DynamoDB: one number per limit, moved on in place.

The number is the time at which the limit will be full again, in nanoseconds (GCRA). DynamoDB adds
to it under a condition, in one request: takers do not read, compute and write back, so they cannot
overwrite each other, not even within one clock tick, and there is nothing to be retried because a
version has moved. A clock that goes back finds the number further ahead, and gets less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._store import Taken
from ._errors import ConditionFailed
from ._items import KEPT, expression, number, number_of
from ._table import DynamoTable

__all__ = ["DynamoRate", "TakePlan", "plan_take"]

_SECOND = 1_000_000_000
#: A number further ahead than this, beyond what the limit allows, was made by a wrong clock.
_ABSURD = 5 * _SECOND
#: How many limits may be remembered before those that are full again are dropped.
_HEARD = 1000
#: How often others may be faster before the answer is "nothing now".
_ATTEMPTS = 20


class TakePlan(NamedTuple):
    """How many tokens are to be taken, and what must still be so when they are."""

    granted: int
    #: What the tokens cost.
    cost: int
    #: The limit is unused: it counts from now. Else the cost is added to what is there.
    idle: bool
    #: What is there lies absurdly far ahead: the limit is set to empty.
    absurd: bool


def plan_take(full_at: int | None, now: int, *, interval: int, burst: int, tokens: int) -> TakePlan:
    """What to ask for, if the limit is full again at `full_at`, as was last heard."""
    depth = burst * interval
    ahead = 0 if full_at is None else max(full_at - now, 0)
    granted = max(0, min(tokens, (depth - ahead) // interval))
    idle = full_at is None or full_at < now
    return TakePlan(granted, granted * interval, idle, ahead > depth + _ABSURD)


class DynamoRate:
    """Takes tokens from limits; `item_key` makes the key of a limit's item."""

    def __init__(self, table: DynamoTable, item_key: Callable[[str], dict[str, Any]]) -> None:
        self._table = table
        self._item_key = item_key
        # What was last heard of each limit. The number only grows, so what it refuses is refused.
        self._heard: dict[str, int] = {}

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with at most `burst` at once."""
        await self._table.ready()
        interval = math.ceil(_SECOND / rate)
        full_at = self._heard.get(key)
        for _ in range(_ATTEMPTS):
            now = int(self._table.link.time.likely() * _SECOND)
            wanted = plan_take(full_at, now, interval=interval, burst=burst, tokens=tokens)
            if wanted.granted == 0 and not wanted.absurd:
                break
            try:
                full_at = await self._write(key, wanted, now, burst * interval, full_at)
            except ConditionFailed as failed:
                full_at = _full_at(failed.item)
                continue
            self._remember(key, full_at, now)
            return Taken(wanted.granted, _wait(full_at, now, interval, burst))
        self._remember(key, full_at, now)
        return Taken(0, _wait(full_at or now, now, interval, burst) or interval / _SECOND)

    async def _write(
        self, key: str, wanted: TakePlan, now: int, depth: int, seen: int | None
    ) -> int:
        if wanted.absurd:
            change = {"Update": "SET #full_at = :next, #ttl_epoch = :ttl"}
            condition, values = "#full_at = :seen", {"next": now + depth, "seen": seen or 0}
        elif wanted.idle:
            change = {"Update": "SET #full_at = :next, #ttl_epoch = :ttl"}
            condition = "attribute_not_exists(#full_at) OR #full_at < :now"
            values = {"next": now + wanted.cost, "now": now}
        else:
            change = {"Update": "SET #full_at = #full_at + :cost, #ttl_epoch = :ttl"}
            condition = "#full_at BETWEEN :now AND :room"
            values = {"cost": wanted.cost, "now": now, "room": now + depth - wanted.cost}
        values["ttl"] = (now + depth) // _SECOND + KEPT
        reply = await self._table.call(
            "update_item",
            Key=self._item_key(key),
            ReturnValues="UPDATED_NEW",
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
            **expression(
                {name: number(value) for name, value in values.items()},
                **change,
                Condition=condition,
            ),
        )
        return number_of(reply["Attributes"], "full_at")

    def _remember(self, key: str, full_at: int | None, now: int) -> None:
        # Limits that are full again say nothing: they would be kept for ever.
        if full_at is None or full_at < now:
            self._heard.pop(key, None)
        else:
            self._heard[key] = full_at
        if len(self._heard) > _HEARD:
            self._heard = {known: at for known, at in self._heard.items() if at > now}


def _full_at(item: Any) -> int | None:
    return number_of(item, "full_at") if item and "full_at" in item else None


def _wait(full_at: int, now: int, interval: int, burst: int) -> float:
    """Seconds until the next token is free."""
    # A microsecond more, so that who waits for it is never early by an error in the last digit.
    late = full_at - now + interval - burst * interval
    return late / _SECOND + 1e-6 if late > 0 else 0.0
