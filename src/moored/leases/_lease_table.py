"""The leases of one client: who must be renewed, who must be told, what must be given back.

This is the part that decides. It does no I/O and has no clock: every method gets the event and the
time, and returns what to do.

Invariants:

- a deadline counts from the moment at which the request was **sent**, never from its answer: the
  store cannot have counted from any earlier;
- a lease ends here once: released, gone, expired or refused, whichever comes first;
- a lease whose fate in the store is unknown is remembered until it was released there, or until it
  must have ended by itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ._policy import Policy
from ._store import Grant, Request
from ._time_heap import TimeHeap

__all__ = ["Entry", "LeaseTable"]

#: A new lease is first renewed somewhere in the last half of its interval, so that leases which
#: were taken together (all of them, at the start of a service) are not renewed together for ever.
FIRST_RENEWAL = (0.5, 1.0)
#: A request whose answer was lost may arrive after its release, if it waited somewhere on the way
#: until the outage was over; so what was not found is released again after so many seconds.
RELEASE_AGAIN = (0.5, 2.0, 5.0)
#: What is due within this part of the interval is renewed along with what is due now.
TOGETHER = 0.05


@dataclass(slots=True, eq=False)
class Entry:
    """One lease that this client holds."""

    request: Request
    #: 0 while it is local: older than every fence that a store gives.
    fence: int
    #: When it is over unless it is renewed, in monotonic seconds; infinity while it is local.
    deadline: float
    #: Seconds between its renewals.
    every: float
    #: Whether it was given by this process alone, because the store could not be asked.
    local: bool = False

    @property
    def id(self) -> str:
        """The id under which the store knows it."""
        return self.request.id


@dataclass(slots=True, eq=False)
class Doubt:
    """One lease that the store may have, and that nobody here wants."""

    request: Request
    #: Whether it was asked for and not answered, so that it may even come into being later.
    asked: bool
    #: How often the store did not find it.
    missed: int = 0


class LeaseTable:
    """All leases of one client, by id."""

    def __init__(self, policy: Policy, *, chance: random.Random) -> None:
        self._policy = policy
        self._chance = chance
        self._entries: dict[str, Entry] = {}
        self._local: dict[str, Entry] = {}
        self._per_key: Counter[str] = Counter()
        self._renewals = TimeHeap()
        self._deadlines = TimeHeap()
        self._doubts: dict[str, Doubt] = {}
        self._undo = TimeHeap()
        self._forget = TimeHeap()

    # -- what happened -------------------------------------------------------------------------

    def granted(self, request: Request, grant: Grant, sent_at: float) -> Entry:
        """The store gave a lease that was asked for at this time."""
        entry = Entry(
            request, grant.fence, self._deadline(request, sent_at), self.interval(request.ttl)
        )
        self._add(entry)
        self._renew_first(entry, sent_at)
        return entry

    def granted_locally(self, request: Request) -> Entry:
        """Nobody could be asked, so this process gave a lease itself."""
        entry = Entry(request, 0, math.inf, self.interval(request.ttl), local=True)
        self._add(entry)
        return entry

    def exchanged(self, entry: Entry, grant: Grant, sent_at: float) -> bool:
        """The store gave a lease in place of a local one; False if that has ended meanwhile."""
        if self._entries.get(entry.id) is not entry:
            return False
        entry.local = False
        del self._local[entry.id]
        entry.fence = grant.fence
        entry.deadline = self._deadline(entry.request, sent_at)
        self._deadlines.set(entry.id, entry.deadline)
        self._renew_first(entry, sent_at)
        return True

    def gone_local(self, entry: Entry, known: str) -> None:
        """A lease has expired that its holder may keep while the store is away: it is held by this
        process alone from now on, and asked for under another id."""
        entry.request = replace(entry.request, id=known)
        entry.local, entry.fence, entry.deadline = True, 0, math.inf
        self._add(entry)

    def renamed(self, entry: Entry, known: str) -> None:
        """A local lease is asked for under another id from now on."""
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id], self._local[entry.id]
            entry.request = replace(entry.request, id=known)
            self._entries[known] = self._local[known] = entry

    def renewed(self, ids: Iterable[str], sent_at: float) -> None:
        """The store extended these leases, as asked at this time."""
        for entry in self._known(ids):
            # Two answers may come in the wrong order: the later request counts.
            entry.deadline = max(entry.deadline, self._deadline(entry.request, sent_at))
            self._deadlines.set(entry.id, entry.deadline)
            self._renewals.set(entry.id, sent_at + entry.every)

    def not_renewed(self, ids: Iterable[str], now: float) -> None:
        """Nobody knows whether the store extended these: they are due still."""
        for entry in self._known(ids):
            self._renewals.set(entry.id, now)

    def gone(self, ids: Iterable[str]) -> list[Entry]:
        """The store does not know these any more; returns those whose holders must be told."""
        return [self._remove(entry) for entry in self._known(ids)]

    def released(self, known: str) -> Entry | None:
        """A holder gives its lease back; None if it had ended already."""
        entry = self._entries.get(known)
        return None if entry is None else self._remove(entry)

    def doubted(self, request: Request, now: float, *, asked: bool = False) -> None:
        """The store may have this lease, and nobody here wants it; `asked` if it was just asked
        for, and not answered."""
        self._doubts[request.id] = Doubt(request, asked)
        self._undo.set(request.id, now)
        # However late the request arrived there, by then it has ended by itself.
        self._forget.set(request.id, now + 2 * request.ttl)

    def undone(self, known: str, ended: bool, now: float) -> None:
        """The store was told to end this one, and had it or not."""
        doubt = self._doubts.get(known)
        if doubt is None:
            return
        if doubt.asked and not ended and doubt.missed < len(RELEASE_AGAIN):
            self._undo.set(known, now + RELEASE_AGAIN[doubt.missed])
            doubt.missed += 1
            return
        del self._doubts[known]
        self._undo.drop(known)
        self._forget.drop(known)

    # -- what to do ----------------------------------------------------------------------------

    def due(self, now: float) -> list[list[Request]]:
        """The leases to renew now, in batches; they are not due again before their answer."""
        if self._renewals.first() > now:
            return []
        ids = self._renewals.pop(now + TOGETHER * self._policy.renew_every)
        return self._batches(self._entries[known].request for known in ids)

    def expired(self, now: float) -> list[Entry]:
        """Those whose deadline has passed: their holders must be told, now."""
        return [self._remove(self._entries[known]) for known in self._deadlines.pop(now)]

    def to_release(self, now: float) -> list[list[Request]]:
        """What the store may still have of this client, and should not, in batches."""
        due = [known for known in self._doubts if self._undo.get(known) <= now]
        return self._batches(self._doubts[known].request for known in due)

    def left_to_time(self, now: float) -> list[Request]:
        """Doubts that have ended by themselves meanwhile, and are forgotten with this."""
        found = self._forget.pop(now)
        for known in found:
            self._undo.drop(known)
        return [self._doubts.pop(known).request for known in found]

    def close(self) -> list[Entry]:
        """All that is held, which is nothing from now on."""
        return [self._remove(entry) for entry in list(self._entries.values())]

    def next_due(self) -> float:
        """When something is to be renewed."""
        return self._renewals.first()

    def next_undo(self) -> float:
        """When something is to be given back that nobody here wants."""
        return self._undo.first()

    def next_deadline(self) -> float:
        """When the first lease is over unless it is renewed."""
        return self._deadlines.first()

    # -- what there is -------------------------------------------------------------------------

    def get(self, known: str) -> Entry | None:
        """The lease with this id, if it is held."""
        return self._entries.get(known)

    def local(self) -> list[Entry]:
        """The leases that this process gave itself."""
        return list(self._local.values())

    def count(self, key: str) -> int:
        """How many leases of a key this client holds."""
        return self._per_key[key]

    @property
    def doubts(self) -> int:
        """How many leases the store may have that nobody here wants."""
        return len(self._doubts)

    def margin(self, ttl: float) -> float:
        """How long before its end in the store a lease is over here."""
        margin = self._policy.margin
        return min(5.0, ttl / 10) if margin is None else margin

    def interval(self, ttl: float) -> float:
        """Seconds between the renewals of a lease that lives this long."""
        return min(self._policy.renew_every, ttl / 3)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __repr__(self) -> str:
        return f"<LeaseTable: {len(self)} leases, {len(self._local)} local, {self.doubts} in doubt>"

    # -- small things --------------------------------------------------------------------------

    def _deadline(self, request: Request, sent_at: float) -> float:
        return sent_at + request.ttl - self.margin(request.ttl)

    def _renew_first(self, entry: Entry, sent_at: float) -> None:
        self._renewals.set(entry.id, sent_at + entry.every * self._chance.uniform(*FIRST_RENEWAL))

    def _add(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        if entry.local:
            self._local[entry.id] = entry
        self._per_key[entry.request.key] += 1
        self._deadlines.set(entry.id, entry.deadline)

    def _remove(self, entry: Entry) -> Entry:
        del self._entries[entry.id]
        self._local.pop(entry.id, None)
        self._renewals.drop(entry.id)
        self._deadlines.drop(entry.id)
        key = entry.request.key
        self._per_key[key] -= 1
        if not self._per_key[key]:
            del self._per_key[key]
        return entry

    def _known(self, ids: Iterable[str]) -> Iterator[Entry]:
        return (entry for known in ids if (entry := self._entries.get(known)) is not None)

    def _batches(self, requests: Iterable[Request]) -> list[list[Request]]:
        todo, size = list(requests), self._policy.batch
        return [todo[start : start + size] for start in range(0, len(todo), size)]
