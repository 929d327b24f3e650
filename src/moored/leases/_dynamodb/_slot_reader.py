"""Reading the slots of a key: all of a small key, as few as possible of a large one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

from .._store import Request
from ._items import Item, expression, number, number_of, text, text_of
from ._plan import Slot, candidates, read_order
from ._table import DynamoTable

__all__ = ["SLOT", "SlotReader", "SlotView"]

#: The prefix of the item key of a slot.
SLOT = "moored_slot#"

#: A key with at most this many slots is read at once; of a larger one, this many are read first.
PAGE = 256
#: A large key that was found full is not read again for this many seconds per slot that was read:
#: reading 10,000 slots costs some 400 read units.
FULL_FOR = 0.0005

_LAST = 2**31


class SlotView(NamedTuple):
    """The slots of a key that were read."""

    slots: dict[int, Slot]
    #: The free slots, in the order in which to try them.
    free: list[int]
    #: The slot that already holds the requested lease.
    mine: int | None


class SlotReader:
    """Finds free slots, and the slots of leases."""

    def __init__(self, table: DynamoTable) -> None:
        self._table = table
        self._clock, self._time = table.link.clock, table.link.time
        # Large keys that were found full: for which limit, and until when to assume so.
        self._full: dict[str, tuple[int, float]] = {}

    async def look(self, request: Request) -> SlotView:
        """Read slots of a key until a free one is found, or all were read."""
        if self._assumed_full(request):
            return SlotView({}, [], None)
        if request.limit <= PAGE or await self._anything_above(request):
            slots = _slots([page async for page, _ in self._read(request.key, 0, _LAST)])
            return self._view(request, slots, range(request.limit))
        seen = 0
        for first, last in read_order(request.id, request.limit):
            page_size = None if seen else PAGE  # after a page without free slots, read large pages
            async for page, span in self._read(request.key, first, last, page_size=page_size):
                view = self._view(request, _slots([page]), span)
                if view.free or view.mine is not None:
                    return view
                seen += len(span)
        self._full[request.key] = (
            request.limit,
            self._clock.monotonic() + seen * FULL_FOR,
        )
        return SlotView({}, [], None)

    async def leases(self, key: str) -> dict[str, int]:
        """Return the slot of each live lease of a key."""
        now = self._time.reached()
        slots = _slots([page async for page, _ in self._read(key, 0, _LAST)])
        return {slot.id: slot.number for slot in slots.values() if slot.live(now)}

    def forget_full(self, key: str) -> None:
        """Read the key again at the next `look`: one of its leases was released."""
        self._full.pop(key, None)

    def _view(self, request: Request, slots: dict[int, Slot], span: Sequence[int]) -> SlotView:
        now = self._time.reached()
        mine = [s.number for s in slots.values() if s.id == request.id and s.live(now)]
        free = candidates(request.id, request.limit, slots, span=span, now_ms=now)
        return SlotView(slots, free, mine[0] if mine else None)

    def _assumed_full(self, request: Request) -> bool:
        limit, until = self._full.get(request.key, (0, 0.0))
        if self._clock.monotonic() < until:
            return request.limit <= limit
        self.forget_full(request.key)
        return False

    async def _anything_above(self, request: Request) -> bool:
        """Whether leases are live in slots above the limit, which was lowered."""
        now = self._time.reached()
        pages = self._read(request.key, request.limit, _LAST)
        return any(slot.live(now) for slot in _slots([page async for page, _ in pages]).values())

    async def _read(
        self, key: str, first: int, last: int, *, page_size: int | None = None
    ) -> AsyncIterator[tuple[list[Item], range]]:
        """Yield the items of a range of slots, page by page, each with the slots it covers."""
        wanted = expression(
            {"pk": text(SLOT + key), "first": number(first), "last": number(last)},
            KeyCondition="#pk = :pk AND #slot BETWEEN :first AND :last",
            Projection="#slot, #id, #expires_ms, #fence",
        )
        if page_size is not None:
            wanted["Limit"] = page_size
        async for page in self._table.pages("query", ConsistentRead=True, **wanted):
            more = page.get("LastEvaluatedKey")
            end = number_of(more, "slot") if more else last
            yield page.get("Items", []), range(first, end + 1)
            first = end + 1


def _slots(pages: Iterable[list[Item]]) -> dict[int, Slot]:
    slots = [
        Slot(
            number_of(item, "slot"),
            text_of(item, "id"),
            number_of(item, "expires_ms"),
            number_of(item, "fence"),
        )
        for page in pages
        for item in page
    ]
    return {slot.number: slot for slot in slots}
