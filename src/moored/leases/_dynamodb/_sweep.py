"""What keeps the counter layout right: ended leases are counted off, and counters are checked.

A sweep is one scan of the table. Each lease whose time is over is deleted and counted off in one
transaction, on condition that it is still there and was not renewed. Where a counter still does not
say how many leases there are (the server deleted some by TTL, or a person did), it is corrected, on
condition that nothing was given or taken back since it was read.

Of all clients of a table one sweeps regularly: who finds that it was done recently leaves it be.
Who is refused a lease looks for himself, when something may have ended since he last looked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
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
from ._errors import Cancelled, ConditionFailed, unavailable
from ._items import Item, expression, number, number_of, text, text_of
from ._table import DynamoTable

__all__ = ["Sweeper", "Swept"]

log = logging.getLogger("moored.leases")

#: The item that says when the table was last swept.
_TURN = {"pk": text("moored_sweep")}
#: A transaction takes 100 actions, and one is the counter's.
_AT_ONCE = 99
#: How often leases are removed anew because some of them were gone, or the counter was wrong.
_ROUNDS = 10


class Swept(NamedTuple):
    """What a sweep did."""

    #: How many leases were ended because their time was over.
    ended: int
    #: How many counters were wrong, and are right now.
    corrected: int


class Sweeper:
    """Ends leases, and corrects counters; `start` does it regularly."""

    def __init__(self, table: DynamoTable) -> None:
        self._table = table
        self._time = table.link.time
        self._every = table.config.sweep_every
        self._supervisor: Supervisor | None = None
        self._stopped = False
        self._one = asyncio.Lock()
        # When a look is worth it: the next end that was seen, and the last look.
        self._next_end: dict[str, int] = {}
        self._swept_at = -float("inf")
        #: How many leases were ended, and counters corrected, in all.
        self.total = Swept(0, 0)

    async def start(self) -> None:
        """Sweep in the background, from now until `stop`; once."""
        if self._supervisor is None and not self._stopped:
            self._supervisor = Supervisor(
                "dynamodb-sweeper",
                children=[Child("sweep", self._run, backoff=Backoff(1.0, 60.0, jitter="full"))],
                intensity=None,
                clock=self._table.link.clock,
            )
            await self._supervisor.start()

    async def stop(self) -> None:
        """End the background sweeps."""
        self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def sweep(self) -> Swept:
        """End all leases whose time is over, and correct the counters that are then wrong."""
        async with self._one:
            return await self._sweep()

    async def sweep_if_due(self, key: str) -> bool:
        """Sweep for one who was refused, if something may have ended; True if he may ask again.

        Holders renew early, so that the next end that was seen is mostly still far away, and a
        full key costs no scan for each refusal.
        """
        before = self._swept_at
        async with self._one:
            if self._swept_at != before:
                return True  # another who was refused has just done it
            ended = self._next_end.get(key, 0) < self._time.reached()
            if not ended and self._time.monotonic() - before < self._every:
                return False
            swept = await self._sweep()
            return swept.ended + swept.corrected > 0

    async def leases(self, key: str | None = None) -> list[Item]:
        """All lease items, of one key or of all, ended ones included."""
        wanted = expression(
            {"prefix": text(LEASE if key is None else f"{LEASE}{key}#")},
            Filter="begins_with(#pk, :prefix)",
        )
        found = await self._table.collect("scan", ConsistentRead=True, **wanted)
        # A key may begin with another one and a "#".
        return [item for item in found if key is None or key_of(item) == key]

    async def end(self, key: str, leases: Sequence[str]) -> set[str]:
        """End leases if their time is over; returns those that were ended."""
        return await self.remove(key, leases, condition=ENDED)

    async def remove(self, key: str, leases: Sequence[str], *, condition: str) -> set[str]:
        """Delete leases and count them off, each on this condition; returns those that held it."""
        distinct = list(dict.fromkeys(leases))
        removed: set[str] = set()
        for start in range(0, len(distinct), _AT_ONCE):
            removed |= await self._remove(key, distinct[start : start + _AT_ONCE], condition)
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
                    # The counter says that fewer live than are to be ended: it is wrong.
                    await self._correct(key)
                leases = [leases[n] for n in left]
            else:
                return set(leases)
        raise unavailable(
            self._table.config, f"{key!r} was changed by others {_ROUNDS} times in a row"
        )

    async def _sweep(self) -> Swept:
        now = self._time.reached()
        items = await self._everything()
        leases = [item for item in items if text_of(item, "pk").startswith(LEASE)]
        ended = await self._end_all([item for item in leases if ends_ms(item) < now])
        self._note(leases, now)
        corrected = 0
        for key in _disagreeing(items, leases):
            corrected += await self._correct(key)
        self.total = Swept(self.total.ended + len(ended), self.total.corrected + corrected)
        return Swept(len(ended), corrected)

    async def _end_all(self, items: Sequence[Item]) -> set[tuple[str, str]]:
        by_key: dict[str, list[str]] = {}
        for item in items:
            by_key.setdefault(key_of(item), []).append(id_of(item))
        return {
            (key, lease) for key, leases in by_key.items() for lease in await self.end(key, leases)
        }

    async def _correct(self, key: str) -> int:
        """Make a counter say how many leases there are; 1 if it did not, else 0."""
        reply = await self._table.call("get_item", Key=counter_of(key), ConsistentRead=True)
        counter: Item = reply.get("Item", {})
        said, there = number_of(counter, "active"), len(await self.leases(key))
        if said == there:
            return 0
        # Each grant moves one number and each return the other, so if neither moved, nothing
        # happened since the counter was read, and the scan saw what belongs to it.
        parts = ("active", "grants", "updated_ms")
        unchanged = " AND ".join(
            f"#{part} = :old_{part}" if part in counter else f"attribute_not_exists(#{part})"
            for part in parts
        )
        old = {f"old_{part}": counter[part] for part in parts if part in counter}
        try:
            await self._table.call(
                "update_item",
                Key=counter_of(key),
                **expression(
                    {**old, "there": number(there), "now": number(self._time.reached())},
                    Update="SET #active = :there, #updated_ms = :now",
                    Condition=unchanged,
                ),
            )
        except ConditionFailed:
            return 0
        log.warning("the counter of %r said %d, and %d leases live: corrected", key, said, there)
        return 1

    def _note(self, leases: Sequence[Item], now: int) -> None:
        """Remember when the next lease of each key ends, unless it is renewed."""
        self._swept_at = self._time.monotonic()
        self._next_end = {}
        for item in leases:
            if (ends := ends_ms(item)) >= now:
                known = self._next_end.get(key_of(item), ends)
                self._next_end[key_of(item)] = min(known, ends)

    async def _claim(self) -> bool:
        """Whether it is this client's turn: nobody has swept for half of the time between."""
        now = self._time.reached()
        try:
            await self._table.call(
                "update_item",
                Key=_TURN,
                **expression(
                    {"now": number(now), "before": number(now - round(self._every * 500))},
                    Update="SET #swept_ms = :now",
                    Condition="attribute_not_exists(#swept_ms) OR #swept_ms <= :before",
                ),
            )
        except ConditionFailed:
            return False
        return True

    async def _everything(self) -> list[Item]:
        """All counters and leases; what else is in the table is of no interest."""
        wanted = expression(
            {"counter": text(COUNTER), "lease": text(LEASE)},
            Filter="begins_with(#pk, :lease) OR begins_with(#pk, :counter)",
        )
        return await self._table.collect("scan", ConsistentRead=True, **wanted)

    async def _run(self, context: Context) -> None:
        context.started()
        random = self._table.link.clock.random
        while True:
            # Spread, so that clients that were started together do not come together.
            await asyncio.sleep(self._every * random.uniform(0.75, 1.25))
            try:
                if await self._claim():
                    await self.sweep()
                    context.healthy()
            except (StoreUnavailable, StoreMisconfigured) as error:
                log.warning("the sweep of %s did not happen: %s", self._table.config.place, error)

    def __repr__(self) -> str:
        return f"<Sweeper: {self.total.ended} ended, {self.total.corrected} corrected>"


def _disagreeing(items: Sequence[Item], leases: Sequence[Item]) -> list[str]:
    """The keys whose counter does not say how many leases were seen in the same scan."""
    there = Counter(key_of(item) for item in leases)
    said = {
        text_of(item, "pk").removeprefix(COUNTER): number_of(item, "active")
        for item in items
        if text_of(item, "pk").startswith(COUNTER)
    }
    return [key for key in sorted({*there, *said}) if said.get(key, 0) != there[key]]
