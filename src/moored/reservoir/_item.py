"""One physical connection, with what the reservoir records about it."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import KW_ONLY, InitVar, dataclass, field
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


@dataclass(slots=True, eq=False, repr=False)
class Item(Generic[C]):
    """A connection with its lifetime, its lease, its place and its holder."""

    conn: C
    _: KW_ONLY
    born: float
    lifetime: InitVar[float]
    guard: InitVar[float]
    lease: Lease | None = None
    #: When it expires, and when its guard window begins.
    expires: float = field(init=False)
    usable_until: float = field(init=False)
    #: Until when it may be handed out without a check.
    fresh_until: float = -math.inf
    place: Place = Place.GONE
    #: Why it is retired when it is returned; None if it may be kept.
    retire_reason: str | None = None
    #: A done future with the connection, which the fast path of asyncio returns.
    ready_future: Any = None
    #: Since when it is in use, by which task or thread, and (with `leak_after`) the stack.
    since: float = field(init=False)
    holder: Any = None
    stack: Any = None
    leak_reported: bool = False
    #: Whether it was checked out with `getconn`, so that `putconn` may return it, once.
    by_getconn: bool = False

    def __post_init__(self, lifetime: float, guard: float) -> None:
        self.since = self.born
        self.expires = self.born + lifetime
        self.usable_until = self.expires - guard

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
