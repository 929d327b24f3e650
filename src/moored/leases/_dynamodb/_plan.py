"""Choosing a slot for a lease, from the slots that were read; without I/O.

The slots of a key are numbered from 0. A lease with limit n may use the slots below n, so the
number of slots enforces the limit, without a counter. After a limit was lowered, leases may be live
in slots above it, and fewer slots may be used: see `usable_slots`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Slot", "candidates", "next_fence", "read_order", "usable_slots"]


class Slot(NamedTuple):
    """A slot as it was read."""

    number: int
    #: The id of its current or last lease.
    id: str
    expires_ms: int
    fence: int

    def live(self, now_ms: int) -> bool:
        """Whether its lease has not expired."""
        return self.expires_ms >= now_ms


def usable_slots(limit: int, live: Iterable[int]) -> int:
    """Return how many slots, from 0 on, may be used so that at most `limit` leases are live.

    That is the largest e <= limit with e + (live leases in slots >= e) <= limit. Without leases
    above the limit it is the limit. Clients that read at different moments may compute different
    values of e; each bounds the leases above it, so together they stay within the limit, too.
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
    """Return the free slots among the numbers in `span`, in the order in which to try them.

    The order depends on the lease's id: different leases rarely try the same slot first, and two
    concurrent requests for the same lease try the same one.
    """
    live = [number for number, slot in slots.items() if slot.live(now_ms)]
    allowed = usable_slots(limit, live)
    taken = set(live)
    free = [number for number in span if number < allowed and number not in taken]
    return sorted(free, key=lambda number: zlib.crc32(f"{lease}/{number}".encode()))


def read_order(lease: str, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of slots to read, as first and last number. The start depends on the
    lease's id: clients read different ranges first, and the same lease always the same one."""
    start = zlib.crc32(lease.encode()) % limit
    yield start, limit - 1
    if start:
        yield 0, start - 1


def next_fence(limit: int, number: int, slots: Mapping[int, Slot], now_ms: int) -> int:
    """Return the fence of a new lease in a slot: the time in ms, or the last fence plus one.

    It is greater than the slot's last fence, and with limit 1 greater than those of all slots of
    the key. Using the time makes it also greater than the fences of slots that were deleted, or
    that were granted before the table was restored from a backup.
    """
    counted = slots.values() if limit == 1 else [slots[number]] if number in slots else []
    return max([now_ms, *(slot.fence + 1 for slot in counted)])
