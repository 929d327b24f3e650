"""Rate limits in DynamoDB: one number per limit, `full_at`, incremented in place.

It is the time at which the limit will be full again, in nanoseconds (GCRA). One conditional request
adds to it. Clients do not read, compute and write back, so they cannot overwrite each other, not
even within one clock tick, and need no retry for a changed version. A client whose clock was set
back finds `full_at` further ahead, and is granted less.
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
#: A `full_at` that exceeds the limit's maximum by this much was written with a wrong clock.
_IMPLAUSIBLE = 5 * _SECOND
#: How many limits may be remembered before those that are full again are dropped.
_REMEMBERED = 1000
#: Attempts of one take whose condition fails, because other clients changed the limit.
_ATTEMPTS = 20


class TakePlan(NamedTuple):
    """How many tokens to take, and how to update `full_at`."""

    granted: int
    #: Nanoseconds to add to `full_at`.
    cost: int
    #: Whether the limit is full: the cost is then added to now, not to `full_at`.
    idle: bool
    #: Whether `full_at` is implausibly far ahead: the limit is then set to empty.
    implausible: bool


def plan_take(full_at: int | None, now: int, *, interval: int, burst: int, tokens: int) -> TakePlan:
    """Return what to request, given the last known `full_at`."""
    depth = burst * interval
    ahead = 0 if full_at is None else max(full_at - now, 0)
    granted = max(0, min(tokens, (depth - ahead) // interval))
    idle = full_at is None or full_at < now
    return TakePlan(granted, granted * interval, idle, ahead > depth + _IMPLAUSIBLE)


class DynamoRate:
    """Takes tokens from rate limits; `item_key` returns the item key of a limit."""

    def __init__(self, table: DynamoTable, item_key: Callable[[str], dict[str, Any]]) -> None:
        self._table = table
        self._item_key = item_key
        # The last known `full_at` of each limit. It only grows, so a take that it refuses needs
        # no request.
        self._known: dict[str, int] = {}

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
        await self._table.ready()
        interval = math.ceil(_SECOND / rate)
        full_at = self._known.get(key)
        for _ in range(_ATTEMPTS):
            now = int(self._table.link.time.likely() * _SECOND)
            wanted = plan_take(full_at, now, interval=interval, burst=burst, tokens=tokens)
            if wanted.granted == 0 and not wanted.implausible:
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
        full_at = ":next"
        if wanted.implausible:
            condition, values = "#full_at = :seen", {"next": now + depth, "seen": seen or 0}
        elif wanted.idle:
            condition = "attribute_not_exists(#full_at) OR #full_at < :now"
            values = {"next": now + wanted.cost, "now": now}
        else:
            full_at = "#full_at + :cost"
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
                Update=f"SET #full_at = {full_at}, #ttl_epoch = :ttl",
                Condition=condition,
            ),
        )
        return number_of(reply["Attributes"], "full_at")

    def _remember(self, key: str, full_at: int | None, now: int) -> None:
        if full_at is not None:
            self._known[key] = full_at
        if len(self._known) > _REMEMBERED:
            self._known = {each: at for each, at in self._known.items() if at > now}


def _full_at(item: Any) -> int | None:
    return number_of(item, "full_at") if item and "full_at" in item else None


def _wait(full_at: int, now: int, interval: int, burst: int) -> float:
    """Return the seconds until the next token is free."""
    # A microsecond more, so that a caller that waits so long is not early by a rounding error.
    late = full_at - now + interval - burst * interval
    return late / _SECOND + 1e-6 if late > 0 else 0.0
