"""The part that decides: who gets which connection, what is opened, and what is let go.

It does no I/O and has no clock: every method gets the time, and returns what to do. The shells do
it: one for asyncio, one for threads, which holds a lock around every call.

What always holds:

- a connection has one holder;
- callers that wait are served in the order in which they came, and nobody overtakes them;
- none is handed out, or kept, within its guard window;
- ready, in use, opening and closing together are never more than `max_size`;
- each connection that comes in goes out once, with a reason that is counted.
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

# Looked up once: this is done at every checkout.
_READY, _OUT = Place.READY, Place.OUT


class Waiter(Generic[C]):
    """A caller in the queue. The shells add how it is woken."""

    __slots__ = ("deadline", "error", "holder", "item", "since")

    def __init__(self, since: float, deadline: float, holder: Any = None) -> None:
        self.since = since
        #: When it gives up.
        self.deadline = deadline
        self.holder = holder
        #: What it got: a connection, or an error.
        self.item: Item[C] | None = None
        self.error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Whether it got something."""
        return self.item is not None or self.error is not None

    def wake(self) -> None:
        """Tell the caller that it got something."""


class Core(Generic[C]):
    """All connections of one reservoir, and the queue of callers before it."""

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
        #: How many callers may wait; 0 for any number.
        self.max_waiting = max_waiting
        self.items: dict[int, Item[C]] = {}
        self.ready: deque[Item[C]] = deque()
        self.waiting: deque[Waiter[C]] = deque()
        #: Connections on their way, and those whose close has begun and not ended.
        self.opening = 0
        self.closing = 0
        #: What the shell must close; it takes them from here.
        self.retired: list[Item[C]] = []
        self.open = True
        self.overload = Overload(queue_target, queue_interval)
        # Counters: all checkouts, callers that had to wait, and those of them that were served.
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
        # Whether one that comes back can be handed on, and whether it is kept if nobody waits.
        self._accepting = True
        self._keeping = config.keep
        self._spare = math.inf
        self._spare_until = -math.inf

    # -- checkout ------------------------------------------------------------------------------

    def take(self, now: float) -> Item[C] | None:
        """The next ready connection, if nobody waits and it needs no look: the usual case."""
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
        """The next ready connection that has life enough; all before it are let go.

        Whoever gets one that is no longer fresh must look at it, and `discard` it if it is bad.
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
            self._retire(item, "guard_on_checkout" if now < item.expires else "expired_on_checkout")
        return None

    def pick(self, item: Item[C], now: float) -> bool:
        """Take this very one out of the ready ones, to look at it; False if it is not ready."""
        if item.place is not Place.READY:
            return False
        self.ready.remove(item)
        item.place = Place.OUT
        item.since = now
        return True

    def refuses(self, now: float, *, patient: bool = False) -> str | None:
        """Why one more caller may not wait, if so; who is patient may join a slow queue."""
        if self.max_waiting and len(self.waiting) >= self.max_waiting:
            self.refused += 1
            return f"{len(self.waiting)} callers wait already (max_waiting={self.max_waiting})"
        if self.overloaded(now) and not patient:
            self.refused += 1
            return (
                "every checkout of the last interval had to wait for longer than the queue's "
                f"target; {len(self.waiting)} callers wait"
            )
        return None

    def overloaded(self, now: float) -> bool:
        """Whether new callers are told so at once, if they would have to wait."""
        self._note_fast(now)
        return self.overload.overloaded and bool(self.waiting)

    def enqueue(self, waiter: Waiter[C]) -> None:
        """A caller begins to wait."""
        self.queued += 1
        self.waiting.append(waiter)

    def leave(self, waiter: Waiter[C], now: float) -> Item[C] | None:
        """A caller waits no longer; returns the connection that it got meanwhile, if it did.

        Whoever does not want that one gives it back.
        """
        if waiter in self.waiting:  # or else it was served, or told an error, meanwhile
            self.waiting.remove(waiter)
            self.waited += now - waiter.since
        return waiter.item

    def expire(self, now: float) -> list[Waiter[C]]:
        """The callers whose time is over; they do not wait any more."""
        late = [waiter for waiter in self.waiting if waiter.deadline <= now]
        for waiter in late:
            self.leave(waiter, now)
            self.timeouts += 1
        return late

    def give_up(self) -> list[Waiter[C]]:
        """Let all who wait go without a connection; they must be told."""
        left = list(self.waiting)
        self.waiting.clear()
        self.refused += len(left)
        return left

    # -- return --------------------------------------------------------------------------------

    def give(self, item: Item[C], now: float) -> Waiter[C] | None:
        """A connection comes back: it goes to the first who waits (who must be woken), or is ready
        again, or is let go. Harmless if nobody has it: it may have been given back before."""
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
        """A connection is at hand that nobody has: for whom it is, or whether it is kept."""
        if now < item.usable_until and self._accepting:
            if self.waiting:
                return self._hand_over(item, now)
            if not self.config.keep:
                self._retire(item, "not_kept")
                return None
            item.fresh_until = min(now + FRESH, item.usable_until)
            item.place = Place.READY
            self.ready.append(item)
            return None
        self._retire(item, self._why_not(item, now))
        return None

    def discard(self, item: Item[C], reason: str) -> None:
        """A connection is of no use any more, wherever it is."""
        if item.place is Place.GONE:
            return
        if item.place is Place.READY:
            self.ready.remove(item)
        self._retire(item, reason)

    def doom(self, item: Item[C], reason: str) -> None:
        """A connection must go: at once if nobody has it, else when it comes back."""
        if item.place is Place.OUT:
            item.doom = item.doom or reason
            item.usable_until = -math.inf
        else:
            self.discard(item, reason)

    # -- births and deaths ---------------------------------------------------------------------

    def plan(self) -> int:
        """How many connections to open now. They count as opening from here on, until each has
        `arrived` or `failed`."""
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
        """A connection was opened: it goes to the first who waits, or is ready."""
        self.opening -= 1
        self.births += 1
        self.items[id(item.conn)] = item
        item.place = Place.OUT
        item.since = now
        if len(self.items) > self.max_size:
            self._accept(False)
        return self.put(item, now)

    def failed(self) -> None:
        """A connection could not be opened."""
        self.opening -= 1

    def closed(self) -> None:
        """The close of a connection has ended."""
        self.closing -= 1

    # -- from time to time ---------------------------------------------------------------------

    def scan(self, now: float, *, replacing: bool) -> float:
        """Let go of what is over, or in excess, or due to be replaced; returns when to look again.

        :param replacing: whether connections may be let go ahead of their end; not while new ones
            cannot be had.
        """
        for item in list(self.ready):
            item.holder = None  # a task that has ended is not kept alive for a name
            if now >= item.usable_until:
                self.discard(item, "guard_on_scan" if now < item.expires else "expired_on_scan")
        self._shrink(now)
        ends = self.config.usable_lifetime < math.inf
        if not (replacing and ends and self.config.enabled and self.open):
            return math.inf
        staying = [item for item in self.items.values() if item.doom is None]
        every = self.config.usable_lifetime / self.max_size
        due = first_replacement((item.usable_until for item in staying), every)
        if due > now:
            return due
        # Replacing must never cost more than a tenth of what there is. One that somebody keeps for
        # ever costs nothing more, and must not keep the others from being replaced.
        kept = sum(item.doom is not None and now - item.since > every for item in self._all())
        if self.target - len(staying) - kept >= max(1, self.target // 10):
            return now + every
        self.doom(min(staying, key=lambda item: item.usable_until), "replaced_ahead")
        return now

    def resize(self, target: int, max_size: int) -> None:
        """From now on so many are kept, and at most so many exist."""
        if not self.config.enabled:
            target = 0
        low = self.config.low_watermark
        self.watermark = target if low is None else min(low, target)
        self.target, self.max_size = target, max_size
        while len(self.items) + self.opening > max_size and self.ready:
            self._retire(self.ready.popleft(), "reservoir_full")
        self._accept(self.open and len(self.items) <= max_size)

    def drain(self) -> None:
        """Let go of every connection there is: those in use when they come back."""
        for item in list(self.items.values()):
            self.doom(item, "drained")

    def close(self) -> list[Waiter[C]]:
        """Hand out nothing more; returns those who wait in vain."""
        self.open = False
        self._accept(False)
        for item in list(self.items.values()):
            self.doom(item, "closed")
        left = list(self.waiting)
        self.waiting.clear()
        return left

    # -- numbers -------------------------------------------------------------------------------

    @property
    def out(self) -> int:
        """How many somebody has."""
        return len(self.items) - len(self.ready)

    @property
    def size(self) -> int:
        """How many physical connections there are, or may be in this moment."""
        return len(self.items) + self.opening + self.closing

    @property
    def overfull(self) -> bool:
        """Whether there are more than there may be, because it was made smaller."""
        return self.size > self.max_size

    @property
    def can_grow(self) -> bool:
        """Whether one more connection could be opened."""
        return self.size < self.max_size

    def in_use(self) -> Iterator[Item[C]]:
        """Those that somebody has, the one held longest first."""
        out = [item for item in self._all() if item.place is Place.OUT]
        return iter(sorted(out, key=lambda item: item.since))

    # -- small things --------------------------------------------------------------------------

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
        """Checkouts that did not wait are only counted where they happen; here they are told."""
        fast = self.checkouts - self.handed
        if fast != self._fast_seen:
            self._fast_seen = fast
            self.overload.served(0.0, now)

    def _retire(self, item: Item[C], reason: str) -> None:
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
        if item.doom is not None:
            return item.doom
        if not self.open:
            return "closed"
        if now >= item.usable_until:
            return "guard_on_return" if now < item.expires else "expired_on_return"
        return "reservoir_full"

    def _shrink(self, now: float) -> None:
        """Let go of what is more than the target and was never needed for as long as `max_idle`.

        In first-in-first-out order every connection is used now and then, also when half of them
        would do. So it is not their idle time that counts, but how many were ready at the least.
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
        """A copy, made at one go: numbers and words are asked for by any thread, without a lock."""
        return list(self.items.values())
