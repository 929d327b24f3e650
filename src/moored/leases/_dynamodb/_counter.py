"""Leases as a counter and one item each, by a schema that other programs share.

What is given and taken back changes the counter and the lease in one transaction, so they agree.
Two things would make them drift apart, and are repaired by a `Sweeper`: holders that crash, whose
leases stay counted until somebody ends them, and the server's own deletion by TTL, which ends
leases without counting them off.

Prefer the layout with slots where you may choose: it needs no repair, no transactions (which cost
twice as much, and get in each other's way at the counter), and no scans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from moored.kernel import Clock

from .._store import Grant, Held, Request
from ._batch import Statement, update_all
from ._config import DynamoConfig
from ._counter_items import LIVE, add_lease, endpoint_of, ends_ms, id_of, key_of, lease_of
from ._errors import Cancelled, ConditionFailed, Reason, unavailable
from ._items import Item, expression, held, millis, number, number_of
from ._store import DynamoStore
from ._sweep import Sweeper, Swept
from ._time import ServerTime

__all__ = ["CounterStore"]

#: How often a lease is asked for anew because a fence, or an old lease of its id, was in the way.
_ROUNDS = 20
_FENCES = 10_000


class CounterStore(DynamoStore):
    """Leases and rate limits in DynamoDB, with a counter that is kept right.

    It sweeps in the background from its first use on.
    """

    _more_key: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        super().__init__(config, clock=clock, time=time)
        self._sweeper = Sweeper(self._table)
        # The last fence of each key that this client has seen, so that the next is proposed right.
        self._fences: dict[str, int] = {}

    async def close(self) -> None:
        """Stop sweeping, and let go of the connections; leases stay as they are."""
        await self._sweeper.stop()
        await super().close()

    async def sweep(self) -> Swept:
        """End the leases whose time is over, and correct counters that do not agree, now."""
        await self._table.ready()
        return await self._sweeper.sweep()

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases by their ttl from now; False for each that does not live any more."""
        await self._ready()
        return await self._time.settled(
            lambda lives: update_all(
                self._table, [self._renewal(_shared(r), lives) for r in requests]
            )
        )

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that did not live."""
        await self._ready()
        requests = [_shared(request) for request in requests]
        by_key: dict[str, list[str]] = {}
        for request in requests:
            by_key.setdefault(request.key, []).append(request.id)
        ended = {
            (key, lease)
            for key, leases in by_key.items()
            for lease in await self._sweeper.remove(key, leases, condition=LIVE)
        }
        return list(_once(requests, ended))

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases, of one key or of all: a scan of the whole table, either way."""
        await self._ready()
        now = self._time.reached()
        items = await self._sweeper.leases(None if key is None else endpoint_of(key))
        return [self._held(item) for item in items if ends_ms(item) >= now]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._sweeper}>"

    # -- acquire ---------------------------------------------------------------------------------

    async def _acquire(self, request: Request, lives: int) -> Grant | None:
        request = _shared(request)
        for _ in range(_ROUNDS):
            fence = max(self._fences.get(request.key, 0) + 1, self._time.reached())
            try:
                await self._add(request, fence)
            except Cancelled as cancelled:
                counter, lease = cancelled.reasons
                if lease.refused:
                    if grant := await self._again(request, lives):
                        return grant
                elif not await self._may_retry(request, counter):
                    return None
            else:
                self._saw_fence(request.key, fence)
                return Grant(request.id, fence)
        raise unavailable(
            self.link.config, f"{request.key!r} was changed by others {_ROUNDS} times in a row"
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
        """Whether to ask again, after the counter said no."""
        item = counter.item or {}
        self._saw_fence(request.key, number_of(item, "fence"))
        if number_of(item, "active") < request.limit:
            return True  # the fence was too small; now it is known
        return await self._sweeper.sweep_if_due(request.key)

    def _saw_fence(self, key: str, fence: int) -> None:
        if len(self._fences) >= _FENCES:
            self._fences.clear()  # each is learned again from a refusal
        self._fences[key] = max(fence, self._fences.get(key, 0))

    async def _again(self, request: Request, lives: int) -> Grant | None:
        """The lease of this id once more: it lives on from now, or is ended if its time is over."""
        ends = self._time.end_of(request.ttl)
        try:
            reply = await self._table.call(
                "update_item",
                Key=lease_of(request.key, request.id),
                ReturnValues="ALL_NEW",
                **expression(
                    {
                        "ends": number(ends),
                        "ttl": number(math.ceil(ends / 1000)),
                        "lives": number(lives),
                    },
                    Update="SET #expires_ms = :ends, #ttl_epoch = :ttl",
                    Condition="#expires_ms >= :lives",
                ),
            )
        except ConditionFailed:
            await self._sweeper.end(request.key, [request.id])
            return None
        return Grant(request.id, number_of(reply["Attributes"], "fence"))

    # -- the rest --------------------------------------------------------------------------------

    def _renewal(self, request: Request, lives: int) -> Statement:
        key = lease_of(request.key, request.id)["pk"]
        ends = self._time.end_of(request.ttl)
        return Statement(
            item=(key["S"],),
            text=f'UPDATE "{self.link.config.table}" SET "expires_ms" = ? SET "ttl_epoch" = ? '
            'WHERE "pk" = ? AND "expires_ms" >= ?',
            parameters=(
                number(ends),
                number(math.ceil(ends / 1000)),
                key,
                number(lives),
            ),
        )

    async def _ready(self) -> None:
        await super()._ready()
        await self._sweeper.start()

    def _held(self, item: Item) -> Held:
        latest = self._time.latest()
        return held(key_of(item), id_of(item), item, ends=ends_ms(item) / 1000, latest=latest)


def _shared(request: Request) -> Request:
    """The request under the key that other programs use."""
    return replace(request, key=endpoint_of(request.key))


def _once(requests: Sequence[Request], ended: set[tuple[str, str]]) -> Iterator[bool]:
    """Whether each lease was ended; one that is named twice was ended by the first."""
    for request in requests:
        yield (request.key, request.id) in ended
        ended.discard((request.key, request.id))
