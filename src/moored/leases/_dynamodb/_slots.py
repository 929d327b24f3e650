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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from moored.kernel import Clock

from .._store import Grant, Held, Request
from ._batch import Statement, update_all
from ._config import DynamoConfig
from ._errors import ConditionFailed
from ._items import (
    KEPT,
    Item,
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
        answers = await self._time.settled(
            lambda lives: self._update(requests, partial(self._renewal, lives))
        )
        for request, lives in zip(requests, answers, strict=True):
            if not lives:
                self._hints.forget(request)
        return answers

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        await self._table.ready()
        answers = await self._update(requests, partial(self._ending, self._time.reached()))
        for request in requests:
            self._hints.forget(request)
            self._slots.forget_full(request.key)
        return answers

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key (a query), or of all keys (a scan of the table)."""
        await self._table.ready()
        values = {"now": number(self._time.reached())}
        if key is not None:
            values["pk"] = text(SLOT + key)
            wanted = expression(values, KeyCondition="#pk = :pk", Filter="#expires_ms >= :now")
            items = await self._table.collect("query", ConsistentRead=True, **wanted)
        else:
            values["pk"] = text(SLOT)
            live = "begins_with(#pk, :pk) AND #expires_ms >= :now"
            wanted = expression(values, Filter=live)
            items = await self._table.collect("scan", ConsistentRead=True, **wanted)
        return [self._held(item) for item in items]

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
        change = ", ".join(f"#{name} = :{name}" for name in values)
        self._hints.note(request, slot)
        try:
            await self._table.call(
                "update_item",
                Key=_item_key(SLOT + request.key, slot),
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
                **expression(
                    {**values, "now": number(self._time.reached())},
                    Update=f"SET {change}",
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
        try:
            reply = await self._table.call(
                "update_item",
                Key=_item_key(SLOT + request.key, slot),
                ReturnValues="ALL_NEW",
                **expression(
                    {
                        "id": text(request.id),
                        "expires_ms": number(self._time.end_of(request.ttl)),
                        "ttl_epoch": number(self._kept(request.ttl)),
                        "lives": number(lives),
                    },
                    Update="SET #expires_ms = :expires_ms, #ttl_epoch = :ttl_epoch",
                    Condition="#id = :id AND #expires_ms >= :lives",
                ),
            )
        except ConditionFailed:
            self._hints.forget(request)
            return None
        self._hints.note(request, slot)
        return Grant(request.id, number_of(reply["Attributes"], "fence"))

    # -- renew and release -----------------------------------------------------------------------

    async def _update(
        self, requests: Sequence[Request], statement: Callable[[Request, int], Statement]
    ) -> list[bool]:
        """Run a statement on the slot of each lease; False for each that has no slot."""
        slots = await self._find(requests)
        found = {n: slot for n, slot in enumerate(slots) if slot is not None}
        statements = [statement(requests[n], slot) for n, slot in found.items()]
        answers = [False] * len(requests)
        for n, answer in zip(found, await update_all(self._table, statements), strict=True):
            answers[n] = answer
        return answers

    async def _find(self, requests: Sequence[Request]) -> list[int | None]:
        """Return the slot of each lease, from the hints or by reading its key."""
        unknown = {request.key for request in requests if self._hints.of(request) is None}
        pages = [self._slots.leases(key) for key in unknown]
        read = dict(zip(unknown, await asyncio.gather(*pages), strict=True))
        return [
            known if (known := self._hints.of(r)) is not None else read.get(r.key, {}).get(r.id)
            for r in requests
        ]

    def _renewal(self, lives: int, request: Request, slot: int) -> Statement:
        self._hints.note(request, slot)
        end, kept = number(self._time.end_of(request.ttl)), number(self._kept(request.ttl))
        change = 'SET "expires_ms" = ? SET "ttl_epoch" = ?'
        return self._statement(change, (end, kept), request, slot, lives)

    def _ending(self, lives: int, request: Request, slot: int) -> Statement:
        return self._statement('SET "expires_ms" = ?', (number(0),), request, slot, lives)

    def _statement(
        self,
        change: str,
        values: Iterable[dict[str, str]],
        request: Request,
        slot: int,
        lives: int,
    ) -> Statement:
        key = text(SLOT + request.key), number(slot)
        return Statement(
            item=(SLOT + request.key, str(slot)),
            text=f'UPDATE "{self.link.config.table}" {change} '
            'WHERE "pk" = ? AND "slot" = ? AND "id" = ? AND "expires_ms" >= ?',
            parameters=(*values, *key, text(request.id), number(lives)),
        )

    def _kept(self, ttl: float) -> int:
        """Return the `ttl_epoch` of an item, long after the time at which it is last needed."""
        return int(self._time.latest() + ttl) + KEPT

    def _held(self, item: Item) -> Held:
        return held(
            text_of(item, "pk").removeprefix(SLOT),
            text_of(item, "id"),
            item,
            ends=number_of(item, "expires_ms") / 1000,
            latest=self._time.latest(),
        )


def _item_key(pk: str, slot: int) -> dict[str, Any]:
    return {"pk": text(pk), "slot": number(slot)}
