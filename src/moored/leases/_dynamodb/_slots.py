"""The slot layout: an item for each lease that the limit allows, so that no counter is needed.

========================  ========  ============================================================
item                      slot      attributes
========================  ========  ============================================================
``moored_slot#KEY``     0, 1, …   ``id``, ``expires_ms``, ``fence``, ``created_ms``,
                                    ``service_name``, ``owner``, ``host``, ``pid``, ``ttl_epoch``
``moored_rate#KEY``     0         ``full_at``, ``ttl_epoch``
========================  ========  ============================================================

An acquire reads the slots of the key (one consistent query) and writes a free one, on condition
that it is still free. A release sets `expires_ms` to 0; the item stays, with its fence. The slot of
a crashed holder is free when its lease expires, without any repair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from moored.kernel import Clock, all_of

from .._store import Grant, Held, Request
from ._config import DynamoConfig
from ._errors import ConditionFailed
from ._items import (
    KEPT,
    Item,
    assigned,
    expression,
    held,
    holder_values,
    millis,
    number,
    number_of,
    text,
    text_of,
)
from ._plan import next_fence
from ._slot_hints import SlotHints
from ._slot_reader import SLOT, SlotReader, SlotView
from ._store import DynamoStore
from ._time import ServerTime

__all__ = ["SlotStore"]

#: Slots that an acquire tries after each read, and reads that it makes, while other clients take
#: the free slots first.
_TRIES = 4
_ROUNDS = 10


class SlotStore(DynamoStore):
    """Leases and rate limits in DynamoDB, in the slot layout."""

    _more_key: ClassVar[dict[str, Any]] = {"slot": number(0)}

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        super().__init__(config, clock=clock, time=time)
        self._hints = SlotHints(clock)
        self._slots = SlotReader(self._table)

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live."""
        await self._table.ready()
        return await self._time.settled(
            lambda lives: self._each(requests, lambda r, slot: self._again(r, slot, lives))
        )

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        await self._table.ready()
        now, ended = self._time.reached(), {"expires_ms": number(0)}
        answers = await self._each(requests, lambda r, slot: self._change(r, slot, ended, now))
        for request in requests:
            self._hints.forget(request)
            self._slots.forget_full(request.key)
        return answers

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key (a query), or of all keys (a scan of the table)."""
        await self._table.ready()
        values = {"pk": text(SLOT + (key or "")), "now": number(self._time.reached())}
        if key is not None:
            wanted = expression(values, KeyCondition="#pk = :pk", Filter="#expires_ms >= :now")
        else:
            wanted = expression(values, Filter="begins_with(#pk, :pk) AND #expires_ms >= :now")
        operation = "scan" if key is None else "query"
        items = await self._table.collect(operation, ConsistentRead=True, **wanted)
        latest = self._time.latest()
        return [
            held(
                text_of(item, "pk").removeprefix(SLOT),
                text_of(item, "id"),
                item,
                number_of(item, "expires_ms"),
                latest,
            )
            for item in items
        ]

    # -- acquire ---------------------------------------------------------------------------------

    async def _acquire(self, request: Request, lives: int) -> Grant | None:
        known = self._hints.of(request)
        if known is not None and (grant := await self._again(request, known, lives)):
            return grant
        for _ in range(_ROUNDS):
            view = await self._slots.look(request)
            if view.mine is not None:
                if grant := await self._again(request, view.mine, lives):
                    return grant
                continue
            if not view.free:
                return None
            for slot in view.free[:_TRIES]:
                if grant := await self._occupy(request, slot, view, lives):
                    return grant
        return None

    async def _occupy(
        self, request: Request, slot: int, view: SlotView, lives: int
    ) -> Grant | None:
        """Write a lease into a slot, on condition that the slot is still free."""
        fence = next_fence(request.limit, slot, view.slots, self._time.reached())
        values = {
            "fence": number(fence),
            "id": text(request.id),
            "expires_ms": number(self._time.end_of(request.ttl)),
            "created_ms": number(millis(self._time.likely())),
            "ttl_epoch": number(self._kept(request.ttl)),
            **holder_values(request.holder),
        }
        self._hints.note(request, slot)
        try:
            await self._table.call(
                "update_item",
                Key=_item_key(SLOT + request.key, slot),
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
                **expression(
                    {**values, "now": number(self._time.reached())},
                    Update=assigned(values),
                    Condition="attribute_not_exists(#pk) OR "
                    "(#expires_ms < :now AND #fence < :fence)",
                ),
            )
        except ConditionFailed as failed:
            if failed.item and text_of(failed.item, "id") == request.id:
                # Written by an attempt whose response was lost, or by a concurrent request.
                return await self._again(request, slot, lives)
            self._hints.forget(request)
            return None
        return Grant(request.id, fence)

    async def _again(self, request: Request, slot: int, lives: int) -> Grant | None:
        """Renew the lease in this slot if it is the requested one."""
        values = {
            "expires_ms": number(self._time.end_of(request.ttl)),
            "ttl_epoch": number(self._kept(request.ttl)),
        }
        item = await self._change(request, slot, values, lives)
        if item is None:
            self._hints.forget(request)
            return None
        self._hints.note(request, slot)
        return Grant(request.id, number_of(item, "fence"))

    # -- renew and release -----------------------------------------------------------------------

    async def _each(
        self, requests: Sequence[Request], update: Callable[[Request, int], Awaitable[object]]
    ) -> list[bool]:
        """Update the slot of each lease; False for each that has none."""
        slots = await self._find(requests)

        async def one(request: Request, slot: int | None) -> bool:
            return slot is not None and await update(request, slot) is not None

        return await all_of(*map(one, requests, slots))

    async def _find(self, requests: Sequence[Request]) -> list[int | None]:
        """Return the slot of each lease, from the hints or by reading its key."""
        unknown = {request.key for request in requests if self._hints.of(request) is None}
        pages = [self._slots.leases(key) for key in unknown]
        read = dict(zip(unknown, await asyncio.gather(*pages), strict=True))
        return [
            known if (known := self._hints.of(r)) is not None else read.get(r.key, {}).get(r.id)
            for r in requests
        ]

    async def _change(self, request: Request, slot: int, values: Item, lives: int) -> Item | None:
        """Change the lease in this slot if it is the requested one, and live; else return None."""
        return await self._table.update(
            _item_key(SLOT + request.key, slot),
            values,
            "#id = :id AND #expires_ms >= :lives",
            id=text(request.id),
            lives=number(lives),
        )

    def _kept(self, ttl: float) -> int:
        """Return the `ttl_epoch` of an item, long after the time at which it is last needed."""
        return int(self._time.latest() + ttl) + KEPT


def _item_key(pk: str, slot: int) -> dict[str, Any]:
    return {"pk": text(pk), "slot": number(slot)}
