"""One physical connection, with what the reservoir records about it."""

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

#: A connection that was in use within this many seconds is handed out without a check.
FRESH = 0.1


class Place(Enum):
    """Where a connection is."""

    READY = "ready"
    #: Held by a caller, or being checked.
    OUT = "in use"
    #: Retired: it is closing or closed.
    GONE = "gone"


class Item(Generic[C]):
    """A connection with its lifetime, its lease, its place and its holder."""

    __slots__ = (
        "born",
        "by_getconn",
        "conn",
        "expires",
        "fresh_until",
        "holder",
        "leak_reported",
        "lease",
        "place",
        "ready_future",
        "retire_reason",
        "since",
        "stack",
        "usable_until",
    )

    def __init__(
        self, conn: C, *, born: float, lifetime: float, guard: float, lease: Lease | None = None
    ) -> None:
        self.conn = conn
        self.born = born
        #: When it expires.
        self.expires = born + lifetime
        #: When its guard window begins.
        self.usable_until = self.expires - guard
        #: Until when it may be handed out without a check.
        self.fresh_until = -math.inf
        self.lease = lease
        self.place = Place.GONE
        #: Why it is retired when it is returned; None if it may be kept.
        self.retire_reason: str | None = None
        #: A done future with the connection, which the fast path of asyncio returns.
        self.ready_future: Any = None
        #: Since when it is in use, by which task or thread, and (with `leak_after`) the stack.
        self.since = born
        self.holder: Any = None
        self.stack: Any = None
        self.leak_reported = False
        #: Whether it was checked out with `getconn`, so that `putconn` may return it, once.
        self.by_getconn = False

    @property
    def idle_since(self) -> float:
        """When it was returned."""
        return self.fresh_until - FRESH

    def __repr__(self) -> str:
        return f"<Item {self.place.value}, {duration(self.expires - self.born)} to live>"


def holder_name(holder: Any) -> str:
    """Describe the task or thread that holds a connection."""
    if isinstance(holder, asyncio.Task):
        return f'checkout of task "{holder.get_name()}"'
    if isinstance(holder, int):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return f'checkout of thread "{names.get(holder, holder)}"'
    return str(holder)
