"""One physical connection, as the reservoir knows it."""

from __future__ import annotations

import asyncio
import math
import threading
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from moored.kernel import duration

if TYPE_CHECKING:
    from moored.leases import Lease

__all__ = ["FRESH", "Item", "Place", "holder_name"]

C = TypeVar("C")

#: A connection that was in use so short a time ago is handed out without a look at it.
FRESH = 0.1


class Place(Enum):
    """Where a connection is."""

    READY = "ready"
    #: With a caller.
    OUT = "in use"
    #: Not to be used any more: it is being closed, or has been.
    GONE = "gone"


class Item(Generic[C]):
    """A connection with its lifetime, its lease and its whereabouts."""

    __slots__ = (
        "at_hand",
        "born",
        "by_hand",
        "conn",
        "doom",
        "expires",
        "fresh_until",
        "holder",
        "leak_told",
        "lease",
        "place",
        "since",
        "stack",
        "usable_until",
    )

    def __init__(
        self, conn: C, *, born: float, lifetime: float, guard: float, lease: Lease | None = None
    ) -> None:
        self.conn = conn
        self.born = born
        #: When its life is over; drawn once, at its birth.
        self.expires = born + lifetime
        #: When its guard window begins.
        self.usable_until = self.expires - guard
        #: Until when it may be handed out without a look at it.
        self.fresh_until = -math.inf
        self.lease = lease
        self.place = Place.GONE
        #: Why it must not be kept when it comes back.
        self.doom: str | None = None
        #: What a caller under asyncio awaits when it is ready.
        self.at_hand: Any = None
        #: Since when, with whom, and (if leaks are looked for) from where it is in use.
        self.since = born
        self.holder: Any = None
        self.stack: Any = None
        self.leak_told = False
        #: Whether it was taken with `getconn`, so that `putconn` may give it back, once.
        self.by_hand = False

    @property
    def idle_since(self) -> float:
        """Since when it is ready."""
        return self.fresh_until - FRESH

    def __repr__(self) -> str:
        return f"<Item {self.place.value}, {duration(self.expires - self.born)} to live>"


def holder_name(holder: Any) -> str:
    """Who has a connection, in words."""
    if isinstance(holder, asyncio.Task):
        return f'checkout of task "{holder.get_name()}"'
    if isinstance(holder, int):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return f'checkout of thread "{names.get(holder, holder)}"'
    if isinstance(holder, threading.Thread):
        return f'checkout of thread "{holder.name}"'
    return str(holder)
