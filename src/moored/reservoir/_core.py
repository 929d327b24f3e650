"""The core: decides which caller gets which connection, and which to open, keep and close.

It does no I/O and has no clock: every method receives the time, and returns or stores what is to be
done. The pools do it: the one for asyncio, and the one for threads, which holds a lock around every
call.

Invariants:

- a connection has one holder;
- waiting callers are served in the order of their arrival, and no caller overtakes them;
- no connection is handed out, or kept, within its guard window;
- ready, in use, opening and closing connections together are never more than `max_size`;
- each connection is retired exactly once, with a reason that is counted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from ._config import ReservoirConfig
from ._item import FRESH, Item, Place
from ._overload import Overload
from ._schedule import first_replacement

__all__ = ["Core", "Waiter"]

C = TypeVar("C")

# Module globals, because attributes of an enum are too slow for every checkout.
_READY, _OUT = Place.READY, Place.OUT


class Waiter(Generic[C]):
    """A caller in the queue; the pools' subclasses implement `wake`."""

    __slots__ = ("deadline", "error", "holder", "item", "since")

    def __init__(self, since: float, deadline: float, holder: Any = None) -> None:
        self.since = since
        #: When its timeout expires.
        self.deadline = deadline
        self.holder = holder
        #: The result: a connection, or an error.
        self.item: Item[C] | None = None
        self.error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Whether the caller got a connection or an error."""
        return self.item is not None or self.error is not None

    def wake(self) -> None:
        """Wake the caller: it was served, or its wait has ended."""


class Core(Generic[C]):
    """All connections of one reservoir, and its queue of waiting callers."""

    def __init__(
        self,
        config: ReservoirConfig,
        *,
        max_waiting: int = 0,
        queue_target: float = 5.0,
        queue_interval: float = 10.0,
    ) -> None:
        self.config = config
        self.max_size = config.max_size
        self.target = config.target
        self.watermark = config.watermark
        #: How many callers may wait; 0 for no limit.
        self.max_waiting = max_waiting
        self.items: dict[int, Item[C]] = {}
        self.ready: deque[Item[C]] = deque()
        self.waiting: deque[Waiter[C]] = deque()
        #: Connects and closes that are in progress.
        self.opening = 0
        self.closing = 0
        #: Connections that `Upkeep` must close; it takes them from here.
        self.retired: list[Item[C]] = []
        self.open = True
        self.overload = Overload(queue_target, queue_interval)
        # Counters: all checkouts, callers that had to wait, and waiters that were served.
        self.checkouts = 0
        self.queued = 0
        self.handed = 0
        self.usage = 0.0
        self.waited = 0.0
        self.empty = 0
        self.refused = 0
        self.timeouts = 0
        self.births = 0
        self.discards: Counter[str] = Counter()
        self._fast_seen = 0
        # Whether a returned connection may go to a waiter, and whether it is kept if none waits.
        self._accepting = True
        self._keeping = config.keep
        self._spare = math.inf
        self._spare_until = -math.inf

    # -- checkout ------------------------------------------------------------------------------

    def take(self, now: float) -> Item[C] | None:
        """Take the next ready connection if it needs no check and no caller waits (fast path)."""
        ready = self.ready
        if ready and not self.waiting:
            item = ready.popleft()
            if now < item.fresh_until:
                item.place = _OUT
                item.since = now
                self.checkouts += 1
                return item
            ready.appendleft(item)
        return None

    def search(self, now: float) -> Item[C] | None:
        """Take the next ready connection that is not in its guard window; retire those that are.

        The caller must check a connection that is no longer fresh, and `discard` it if it is bad.
        """
        if self.waiting:
            return None
        while self.ready:
            item = self.ready.popleft()
            if now < item.usable_until:
                item.place = Place.OUT
                item.since = now
                self.checkouts += 1
                return item
            self._retire_now(
                item, "guard_on_checkout" if now < item.expires else "expired_on_checkout"
            )
        return None

    def pick(self, item: Item[C], now: float) -> bool:
        """Take this ready connection, to check it; False if it is not ready any more."""
        if item.place is not Place.READY:
            return False
        self.ready.remove(item)
        item.place = Place.OUT
        item.since = now
        return True

    def refuses(self, now: float, *, patient: bool = False) -> str | None:
        """Return why one more caller may not wait; None if it may.

        :param patient: whether the caller may join an overloaded queue.
        """
        if self.max_waiting and len(self.waiting) >= self.max_waiting:
            self.refused += 1
            return f"{len(self.waiting)} callers wait already (max_waiting={self.max_waiting})"
        if self.overloaded(now) and not patient:
            self.refused += 1
            return (
                "every checkout of the last queue_interval waited for longer than queue_target; "
                f"{len(self.waiting)} callers wait"
            )
        return None

    def overloaded(self, now: float) -> bool:
        """Whether a new caller that would have to wait is refused, unless it is patient."""
        self._note_fast(now)
        return self.overload.overloaded and bool(self.waiting)

    def enqueue(self, waiter: Waiter[C]) -> None:
        """Add a waiter to the queue."""
        self.queued += 1
        self.waiting.append(waiter)

    def leave(self, waiter: Waiter[C], now: float, *, late: bool = False) -> Item[C] | None:
        """Remove a waiter from the queue; return the connection that it got meanwhile, if any.

        A caller that does not use that connection must `give` it back.

        :param late: whether the waiter leaves because its timeout has expired.
        """
        if waiter in self.waiting:  # else it was served, or got an error, meanwhile
            self.waiting.remove(waiter)
            self.waited += now - waiter.since
            self.timeouts += late
        return waiter.item

    def expire(self, now: float) -> list[Waiter[C]]:
        """Remove the waiters whose timeout has expired, and return them; they must be woken."""
        late = [waiter for waiter in self.waiting if waiter.deadline <= now]
        for waiter in late:
            self.leave(waiter, now, late=True)
        return late

    def give_up(self) -> list[Waiter[C]]:
        """Remove all waiters from the queue, and return them; each must get an error."""
        left = list(self.waiting)
        self.waiting.clear()
        self.refused += len(left)
        return left

    # -- return --------------------------------------------------------------------------------

    def give(self, item: Item[C], now: float) -> Waiter[C] | None:
        """Take back a connection: for the first waiter, for the ready ones, or to be closed.

        Return the waiter that got it, who must be woken. Do nothing if the connection is not in
        use: it may have been returned before.
        """
        if item.place is not _OUT:
            return None
        self.usage += now - item.since
        fresh_until = now + FRESH
        if self.waiting or fresh_until > item.usable_until or not self._keeping:
            return self.put(item, now)
        item.fresh_until = fresh_until
        item.place = _READY
        self.ready.append(item)
        return None

    def put(self, item: Item[C], now: float) -> Waiter[C] | None:
        """Hand a connection without a holder to the first waiter, keep it, or retire it.

        Return the waiter that got it, who must be woken.
        """
        if now < item.usable_until and self._accepting:
            if self.waiting:
                return self._hand_over(item, now)
            if not self.config.keep:
                self._retire_now(item, "not_kept")
                return None
            item.fresh_until = min(now + FRESH, item.usable_until)
            item.place = Place.READY
            self.ready.append(item)
            return None
        self._retire_now(item, self._why_not(item, now))
        return None

    def discard(self, item: Item[C], reason: str) -> None:
        """Retire a connection now, even if it is in use."""
        if item.place is Place.GONE:
            return
        if item.place is Place.READY:
            self.ready.remove(item)
        self._retire_now(item, reason)

    def retire(self, item: Item[C], reason: str) -> None:
        """Retire a connection: now if it is not in use, else when it is returned."""
        if item.place is Place.OUT:
            item.retire_reason = item.retire_reason or reason
            item.usable_until = -math.inf
        else:
            self.discard(item, reason)

    # -- opening and closing -------------------------------------------------------------------

    def plan(self) -> int:
        """Return how many connections to open now.

        They count as opening until `arrived` or `failed` was called for each.
        """
        if not self.open:
            return 0
        coming = len(self.items) + self.opening
        wanted = max(self.target - coming, len(self.waiting) - self.opening)
        room = self.max_size - self.size
        in_flight = self.config.max_in_flight
        batch = self.config.batch
        if len(self.ready) >= self.watermark and not self.waiting:
            in_flight = batch = 1
        number = max(0, min(wanted, room, batch, in_flight - self.opening))
        self.opening += number
        return number

    def arrived(self, item: Item[C], now: float) -> Waiter[C] | None:
        """Add a connection that was opened; return the waiter that got it, who must be woken."""
        self.opening -= 1
        self.births += 1
        self.items[id(item.conn)] = item
        item.place = Place.OUT
        item.since = now
        if len(self.items) > self.max_size:
            self._accept(False)
        return self.put(item, now)

    def failed(self) -> None:
        """Note that a connect has failed."""
        self.opening -= 1

    def closed(self) -> None:
        """Note that the close of a connection has ended."""
        self.closing -= 1

    # -- maintenance ---------------------------------------------------------------------------

    def scan(self, now: float, *, replacing: bool) -> float:
        """Retire expired, surplus and due connections; return when the next one is due.

        :param replacing: whether connections may be replaced before they expire; not while
            connecting fails.
        """
        for item in list(self.ready):
            item.holder = None  # don't keep a finished task alive
            if now >= item.usable_until:
                self.discard(item, "guard_on_scan" if now < item.expires else "expired_on_scan")
        self._shrink(now)
        ends = self.config.usable_lifetime < math.inf
        if not (replacing and ends and self.config.enabled and self.open):
            return math.inf
        staying = [item for item in self.items.values() if item.retire_reason is None]
        every = self.config.usable_lifetime / self.max_size
        due = first_replacement((item.usable_until for item in staying), every)
        if due > now:
            return due
        # At most a tenth of the connections may be missing because of replacements. One that its
        # holder keeps for very long does not count: it must not stop all other replacements.
        kept = sum(
            item.retire_reason is not None and now - item.since > every for item in self._all()
        )
        if self.target - len(staying) - kept >= max(1, self.target // 10):
            return now + every
        self.retire(min(staying, key=lambda item: item.usable_until), "replaced_ahead")
        return now

    def resize(self, target: int, max_size: int) -> None:
        """Change the number of connections to keep, and the maximum."""
        if not self.config.enabled:
            target = 0
        low = self.config.low_watermark
        self.watermark = target if low is None else min(low, target)
        self.target, self.max_size = target, max_size
        while len(self.items) + self.opening > max_size and self.ready:
            self._retire_now(self.ready.popleft(), "reservoir_full")
        self._accept(self.open and len(self.items) <= max_size)

    def drain(self) -> None:
        """Retire all connections: those in use when they are returned."""
        for item in list(self.items.values()):
            self.retire(item, "drained")

    def close(self) -> list[Waiter[C]]:
        """Retire all connections, and return the waiters; each must get an error."""
        self.open = False
        self._accept(False)
        for item in list(self.items.values()):
            self.retire(item, "closed")
        left = list(self.waiting)
        self.waiting.clear()
        return left

    # -- numbers -------------------------------------------------------------------------------

    @property
    def out(self) -> int:
        """The number of connections in use."""
        return len(self.items) - len(self.ready)

    @property
    def size(self) -> int:
        """The number of physical connections, including those that are opening or closing."""
        return len(self.items) + self.opening + self.closing

    @property
    def overfull(self) -> bool:
        """Whether there are more connections than `max_size`, because that was lowered."""
        return self.size > self.max_size

    @property
    def can_grow(self) -> bool:
        """Whether one more connection could be opened."""
        return self.size < self.max_size

    def in_use(self) -> Iterator[Item[C]]:
        """The connections in use, the one held longest first."""
        out = [item for item in self._all() if item.place is Place.OUT]
        return iter(sorted(out, key=lambda item: item.since))

    # -- helpers -------------------------------------------------------------------------------

    def _hand_over(self, item: Item[C], now: float) -> Waiter[C]:
        waiter = self.waiting.popleft()
        waited = now - waiter.since
        self.waited += waited
        self.checkouts += 1
        self.handed += 1
        self._note_fast(now)
        self.overload.served(waited, now)
        item.place = Place.OUT
        item.since = now
        item.fresh_until = min(now + FRESH, item.usable_until)
        item.holder = waiter.holder
        waiter.item = item
        return waiter

    def _note_fast(self, now: float) -> None:
        """Report fast checkouts to `Overload`: the fast path only counts them."""
        fast = self.checkouts - self.handed
        if fast != self._fast_seen:
            self._fast_seen = fast
            self.overload.served(0.0, now)

    def _retire_now(self, item: Item[C], reason: str) -> None:
        item.place = Place.GONE
        self.items.pop(id(item.conn), None)
        self.discards[reason] += 1
        self.closing += 1
        self.retired.append(item)
        if not self._accepting:
            self._accept(self.open and len(self.items) <= self.max_size)

    def _accept(self, accepting: bool) -> None:
        self._accepting = accepting
        self._keeping = accepting and self.config.keep

    def _why_not(self, item: Item[C], now: float) -> str:
        if item.retire_reason is not None:
            return item.retire_reason
        if not self.open:
            return "closed"
        if now >= item.usable_until:
            return "guard_on_return" if now < item.expires else "expired_on_return"
        return "reservoir_full"

    def _shrink(self, now: float) -> None:
        """Retire connections above the target that were not needed for `max_idle` seconds.

        Connections are used in turn, so each is used now and then even if half of them would do.
        So the surplus is the smallest number of ready connections in that time, not an idle time.
        """
        self._spare = min(self._spare, len(self.ready))
        if now < self._spare_until:
            return
        if self._spare_until > -math.inf:
            surplus = len(self.items) + self.opening - self.target
            for item in list(self.ready)[: max(0, min(surplus, int(self._spare)))]:
                self.discard(item, "idle")
        self._spare = len(self.ready)
        self._spare_until = now + self.config.max_idle

    def _all(self) -> list[Item[C]]:
        """A copy, made in one atomic step: any thread may read statistics without the lock."""
        return list(self.items.values())
