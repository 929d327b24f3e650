"""The sweeper of the counter layout: it deletes expired leases and corrects counters.

A sweep is one scan of the table. Each expired lease is deleted, and the counter decremented, in one
transaction, on condition that the lease still exists and was not renewed. If a counter then differs
from the number of leases (DynamoDB's TTL or an operator deleted some), it is corrected, on
condition that no lease was granted or ended since the counter was read.

Only one client of a table sweeps regularly: a client skips its turn if another one swept recently.
An acquire that is refused sweeps, too, if a lease may have expired since the last sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moored.kernel import Backoff, Child, Context, Supervisor

from .._errors import StoreMisconfigured, StoreUnavailable
from ._counter_items import (
    COUNTER,
    ENDED,
    LEASE,
    counter_of,
    ends_ms,
    id_of,
    key_of,
    remove_leases,
)
from ._errors import Cancelled, unavailable
from ._items import Item, expression, number, number_of, text, text_of
from ._table import DynamoTable

__all__ = ["Sweeper", "Swept"]

log = logging.getLogger("moored.leases")

KeyAndId = tuple[str, str]

#: The item with the time of the last regular sweep.
_LAST_SWEEP = {"pk": text("moored_sweep")}
#: Leases in one transaction: DynamoDB allows 100 actions, and one is the counter's.
_AT_ONCE = 99
#: Attempts of one removal while leases disappear, or the counter is wrong.
_ROUNDS = 10


class Swept(NamedTuple):
    """The result of a sweep."""

    #: Expired leases that were deleted.
    ended: int
    #: Counters that were corrected.
    corrected: int


class Sweeper:
    """Deletes leases and corrects counters; `start` runs it regularly."""

    def __init__(self, table: DynamoTable) -> None:
        self._table = table
        self._clock, self._time = table.link.clock, table.link.time
        self._every = table.config.sweep_every
        self._supervisor: Supervisor | None = None
        self._stopped = False
        self._one = asyncio.Lock()
        # The earliest expiry of each key, and the time of the last sweep, by this client.
        self._next_end: dict[str, int] = {}
        self._swept_at = -float("inf")
        #: The sums of all sweeps of this client.
        self.total = Swept(0, 0)

    async def start(self) -> None:
        """Start the regular sweeps, which run until `stop`; later calls do nothing."""
        if self._supervisor is None and not self._stopped:
            self._supervisor = Supervisor(
                "dynamodb-sweeper",
                children=[Child("sweep", self._run, backoff=Backoff(1.0, 60.0, jitter="full"))],
                intensity=None,
                clock=self._clock,
            )
            await self._supervisor.start()

    async def stop(self) -> None:
        """Stop the regular sweeps."""
        self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def sweep(self) -> Swept:
        """Delete all expired leases, and correct counters that are then wrong."""
        async with self._one:
            return await self._sweep()

    async def sweep_if_due(self, key: str) -> bool:
        """Sweep after a refused acquire, if a lease may have expired; True to try again.

        Holders renew early, so the earliest expiry is mostly still ahead, and most refusals need
        no scan.
        """
        before = self._swept_at
        async with self._one:
            if self._swept_at != before:
                return True  # another refused acquire has just swept
            ended = self._next_end.get(key, 0) < self._time.reached()
            if not ended and self._clock.monotonic() - before < self._every:
                return False
            swept = await self._sweep()
            return swept.ended + swept.corrected > 0

    async def leases(self, key: str | None = None) -> list[Item]:
        """Return all lease items of one key, or of all keys, including expired ones."""
        wanted = expression(
            {"prefix": text(LEASE if key is None else f"{LEASE}{key}#")},
            Filter="begins_with(#pk, :prefix)",
        )
        found = await self._table.collect("scan", ConsistentRead=True, **wanted)
        # A key may begin with another key and a "#".
        return [item for item in found if key is None or key_of(item) == key]

    async def end(self, leases: Iterable[KeyAndId]) -> set[KeyAndId]:
        """Delete those of the leases that have expired, and return them."""
        return await self.remove(leases, ENDED)

    async def remove(self, leases: Iterable[KeyAndId], condition: str) -> set[KeyAndId]:
        """Delete the leases that meet the condition, and decrement their counters."""
        by_key: dict[str, list[str]] = {}
        for key, lease in dict.fromkeys(leases):
            by_key.setdefault(key, []).append(lease)
        removed: set[KeyAndId] = set()
        for key, ids in by_key.items():
            for start in range(0, len(ids), _AT_ONCE):
                ended = await self._remove(key, ids[start : start + _AT_ONCE], condition)
                removed.update((key, lease) for lease in ended)
        return removed

    async def _remove(self, key: str, leases: list[str], condition: str) -> set[str]:
        for _ in range(_ROUNDS):
            if not leases:
                return set()
            now = self._time.reached()
            table = self._table.config.table
            actions = remove_leases(table, key, leases, condition=condition, now_ms=now)
            try:
                await self._table.transact(actions)
            except Cancelled as cancelled:
                counter, *others = cancelled.reasons
                left = [n for n, reason in enumerate(others) if not reason.refused]
                if len(left) == len(leases) and counter.refused:
                    # The counter is lower than the number of leases to delete: it is wrong.
                    await self._correct(key)
                leases = [leases[n] for n in left]
            else:
                return set(leases)
        raise unavailable(
            self._table.config, f"other clients changed {key!r} {_ROUNDS} times in a row"
        )

    async def _sweep(self) -> Swept:
        now = self._time.reached()
        items = await self._everything()
        leases = [item for item in items if text_of(item, "pk").startswith(LEASE)]
        expired = [(key_of(item), id_of(item)) for item in leases if ends_ms(item) < now]
        ended = await self.end(expired)
        self._note(leases, now)
        corrected = 0
        for key in _disagreeing(items, leases):
            corrected += await self._correct(key)
        self.total = Swept(self.total.ended + len(ended), self.total.corrected + corrected)
        return Swept(len(ended), corrected)

    async def _correct(self, key: str) -> int:
        """Set a counter to the number of its leases; returns 1 if it was wrong, else 0."""
        reply = await self._table.call("get_item", Key=counter_of(key), ConsistentRead=True)
        counter: Item = reply.get("Item", {})
        counted, existing = number_of(counter, "active"), len(await self.leases(key))
        if counted == existing:
            return 0
        # Each grant increments `grants`, and each removal changes the others. If all are
        # unchanged, the scan saw exactly the leases that the counter should count.
        names = ("active", "grants", "updated_ms")
        unchanged = " AND ".join(
            f"#{name} = :old_{name}" if name in counter else f"attribute_not_exists(#{name})"
            for name in names
        )
        old = {f"old_{name}": counter[name] for name in names if name in counter}
        values = {"active": number(existing), "updated_ms": number(self._time.reached())}
        if await self._table.update(counter_of(key), values, unchanged, **old) is None:
            return 0
        log.warning("corrected the counter of %r from %d to %d leases", key, counted, existing)
        return 1

    def _note(self, leases: Sequence[Item], now: int) -> None:
        """Remember the earliest expiry of each key."""
        self._swept_at = self._clock.monotonic()
        self._next_end = {}
        for item in leases:
            if (ends := ends_ms(item)) >= now:
                known = self._next_end.get(key_of(item), ends)
                self._next_end[key_of(item)] = min(known, ends)

    async def _claim(self) -> bool:
        """Whether this client should sweep: no client has for half of the interval."""
        now = self._time.reached()
        claimed = await self._table.update(
            _LAST_SWEEP,
            {"swept_ms": number(now)},
            "attribute_not_exists(#swept_ms) OR #swept_ms <= :before",
            before=number(now - round(self._every * 500)),
        )
        return claimed is not None

    async def _everything(self) -> list[Item]:
        """Return the items of all counters and leases."""
        wanted = expression(
            {"counter": text(COUNTER), "lease": text(LEASE)},
            Filter="begins_with(#pk, :lease) OR begins_with(#pk, :counter)",
        )
        return await self._table.collect("scan", ConsistentRead=True, **wanted)

    async def _run(self, context: Context) -> None:
        context.started()
        while True:
            # Spread, so that clients that were started together do not sweep together.
            await asyncio.sleep(self._every * self._clock.random.uniform(0.75, 1.25))
            try:
                if await self._claim():
                    await self.sweep()
                    context.healthy()
            except (StoreUnavailable, StoreMisconfigured) as error:
                log.warning("could not sweep %s: %s", self._table.config.place, error)

    def __repr__(self) -> str:
        return f"<Sweeper: {self.total.ended} ended, {self.total.corrected} corrected>"


def _disagreeing(items: Sequence[Item], leases: Sequence[Item]) -> list[str]:
    """Return the keys whose counter differs from the number of their leases in the scan."""
    existing = Counter(key_of(item) for item in leases)
    counted = {
        text_of(item, "pk").removeprefix(COUNTER): number_of(item, "active")
        for item in items
        if text_of(item, "pk").startswith(COUNTER)
    }
    return [key for key in sorted({*existing, *counted}) if counted.get(key, 0) != existing[key]]
