"""Which slot to take: decided here, from what was read, without a request.

The slots of a key are numbered from 0. A lease with limit n may use the slots below n, so a limit
holds because there are no more slots, not because anybody counts. Where a limit was lowered, leases
live above it, and what may be used shrinks by as many: see `room`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Slot", "candidates", "next_fence", "read_order", "room"]


class Slot(NamedTuple):
    """A slot as it was read."""

    number: int
    #: The id of its lease, or of its last one.
    id: str
    expires_ms: int
    fence: int

    def live(self, now_ms: int) -> bool:
        """Whether its lease still counts."""
        return self.expires_ms >= now_ms


def room(limit: int, live: Iterable[int]) -> int:
    """How many slots, from 0 on, may be used such that at most `limit` leases live in all.

    That is the largest e <= limit with e + (live leases in slots >= e) <= limit. Without leases
    above the limit it is the limit. Clients that see different moments may compute different e;
    each such e bounds what lives above it, so together they stay within the limit too.
    """
    taken = set(live)
    above = sum(number >= limit for number in taken)
    allowed = limit
    while allowed > 0 and allowed + above > limit:
        allowed -= 1
        above += allowed in taken
    return allowed


def candidates(
    lease: str, limit: int, slots: Mapping[int, Slot], *, span: Sequence[int], now_ms: int
) -> list[int]:
    """The free slots among the numbers in `span`, in the order in which this lease tries them.

    The order depends on the lease's id: different leases rarely want the same slot, and the same
    lease, asked for twice at once, wants the same one and so meets itself there.
    """
    live = [number for number, slot in slots.items() if slot.live(now_ms)]
    allowed = room(limit, live)
    taken = set(live)
    free = [number for number in span if number < allowed and number not in taken]
    return sorted(free, key=lambda number: zlib.crc32(f"{lease}/{number}".encode()))


def read_order(lease: str, limit: int) -> Iterator[tuple[int, int]]:
    """The ranges of slots to read, first and last, from a place that depends on the lease: so
    clients look in different places, and the same lease looks in the same ones."""
    start = zlib.crc32(lease.encode()) % limit
    yield start, limit - 1
    if start:
        yield 0, start - 1


def next_fence(limit: int, number: int, slots: Mapping[int, Slot], now_ms: int) -> int:
    """The fence of a new lease in a slot: the time, or more where that is not enough.

    It is greater than the slot's last one, and with limit 1 than those of all slots of the key.
    The time makes it greater, too, than what was given for slots that have been deleted since, or
    before the table was restored from a backup.
    """
    counted = slots.values() if limit == 1 else [slots[number]] if number in slots else []
    return max([now_ms, *(slot.fence + 1 for slot in counted)])
