"""The counter layout: a counter item per key and an item per lease, a schema of other programs.

An acquire or release changes the counter and the lease in one transaction, so they agree. Two
things make them differ, and are repaired by a `Sweeper`: a crashed holder's lease stays counted
after it has expired, and DynamoDB's TTL deletes leases without decrementing the counter.

Prefer the slot layout unless other programs require this one: it needs no repair, no scans, and no
transactions, which cost twice as much and conflict at the counter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from moored.kernel import Clock, all_of

from .._store import Grant, Held, Request, ended_once
from ._config import DynamoConfig
from ._counter_items import LIVE, add_lease, endpoint_of, ends_ms, id_of, key_of, lease_of
from ._errors import Cancelled, Reason, unavailable
from ._items import Item, held, millis, number, number_of
from ._store import DynamoStore
from ._sweep import Sweeper, Swept
from ._time import ServerTime

__all__ = ["CounterStore"]

#: Attempts of one acquire that is refused for its fence, or for an expired lease of its id.
_ROUNDS = 20


class CounterStore(DynamoStore):
    """Leases and rate limits in DynamoDB, in the counter layout.

    From its first use on, it sweeps expired leases in the background.
    """

    _more_key: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        super().__init__(config, clock=clock, time=time)
        self._sweeper = Sweeper(self._table)

    async def close(self) -> None:
        """Stop sweeping, and close the connections; leases stay as they are."""
        await self._sweeper.stop()
        await super().close()

    async def sweep(self) -> Swept:
        """Delete expired leases, and correct counters that do not match their leases, now."""
        await self._table.ready()
        return await self._sweeper.sweep()

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live."""
        await self._ready()
        items = await self._time.settled(
            lambda lives: all_of(*(self._extend(_shared(r), lives) for r in requests))
        )
        return [item is not None for item in items]

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        await self._ready()
        requests = [_shared(request) for request in requests]
        leases = [(request.key, request.id) for request in requests]
        return ended_once(requests, await self._sweeper.remove(leases, LIVE))

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key, or of all keys; both scan the whole table."""
        await self._ready()
        now = self._time.reached()
        items = await self._sweeper.leases(None if key is None else endpoint_of(key))
        latest = self._time.latest()
        return [
            held(key_of(item), id_of(item), item, ends, latest)
            for item in items
            if (ends := ends_ms(item)) >= now
        ]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._sweeper}>"

    # -- acquire ---------------------------------------------------------------------------------

    async def _acquire(self, request: Request, lives: int) -> Grant | None:
        request = _shared(request)
        seen = 0  # the greatest fence of the key, as far as it is known
        for _ in range(_ROUNDS):
            fence = max(seen + 1, self._time.reached())
            try:
                await self._add(request, fence)
            except Cancelled as cancelled:
                counter, lease = cancelled.reasons
                if lease.refused:
                    if grant := await self._again(request, lives):
                        return grant
                elif not await self._may_retry(request, counter):
                    return None
                seen = number_of(counter.item or {}, "fence")
            else:
                return Grant(request.id, fence)
        raise unavailable(
            self.link.config, f"other clients changed {request.key!r} {_ROUNDS} times in a row"
        )

    async def _add(self, request: Request, fence: int) -> None:
        actions = add_lease(
            self.link.config.table,
            request,
            fence=fence,
            ends=self._time.end_of(request.ttl),
            created=millis(self._time.likely()),
        )
        await self._table.transact(actions)

    async def _may_retry(self, request: Request, counter: Reason) -> bool:
        """Whether to try again, after the counter's condition failed."""
        if number_of(counter.item or {}, "active") < request.limit:
            return True  # only the fence was too small, and a greater one is known now
        return await self._sweeper.sweep_if_due(request.key)

    async def _again(self, request: Request, lives: int) -> Grant | None:
        """Renew the existing lease of this id; or delete it and return None if it has expired."""
        item = await self._extend(request, lives)
        if item is None:
            await self._sweeper.end([(request.key, request.id)])
            return None
        return Grant(request.id, number_of(item, "fence"))

    # -- helpers ---------------------------------------------------------------------------------

    async def _extend(self, request: Request, lives: int) -> Item | None:
        ends = self._time.end_of(request.ttl)
        values = {"expires_ms": number(ends), "ttl_epoch": number(math.ceil(ends / 1000))}
        key = lease_of(request.key, request.id)
        return await self._table.update(key, values, "#expires_ms >= :lives", lives=number(lives))

    async def _ready(self) -> None:
        await super()._ready()
        await self._sweeper.start()


def _shared(request: Request) -> Request:
    """Return the request with the key that other programs use."""
    return replace(request, key=endpoint_of(request.key))
