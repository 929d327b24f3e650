"""The leases of one client: which to renew, which have expired, and which to release in the store.

This is the pure core: no I/O and no clock. Every method gets an event and the time, and returns
what to do.

Invariants:

- a deadline counts from the moment at which the request was **sent**, not from the response: the
  store counts the ttl from a later moment;
- a lease ends once: released, gone, expired or refused, whichever comes first;
- a lease in doubt (the store may hold it, and no caller here does) is kept until the store has
  released it, or until it must have expired there.
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

#: The first renewal of a lease comes at a random point in the last half of its interval: leases
#: that were acquired together (at the start of a service) must not be renewed together for ever.
FIRST_RENEWAL = (0.5, 1.0)
#: An acquire that timed out may reach the store after its release, if the network delayed it. So a
#: release that found no lease is repeated after these delays, in seconds.
RELEASE_AGAIN = (0.5, 2.0, 5.0)
#: Leases that are due within this fraction of the interval are renewed along with those due now.
TOGETHER = 0.05


@dataclass(slots=True, eq=False)
class Entry:
    """One lease that this client holds."""

    request: Request
    #: 0 while the lease is local: lower than every fence that a store grants.
    fence: int
    #: When the lease expires unless it is renewed, in monotonic seconds; infinity while local.
    deadline: float
    #: Seconds between renewals.
    every: float
    #: Whether this process granted the lease itself, because the store was unavailable.
    local: bool = False

    @property
    def id(self) -> str:
        """The lease's id in the store."""
        return self.request.id


@dataclass(slots=True, eq=False)
class Doubt:
    """A lease in doubt: the store may hold it, and no caller of this client does."""

    request: Request
    #: Whether its acquire was not answered: the store may still receive it.
    unanswered: bool
    #: How many releases did not find the lease in the store.
    missed: int = 0


class LeaseTable:
    """All leases of one client, by id."""

    def __init__(self, policy: Policy, *, chance: random.Random) -> None:
        self._policy = policy
        self._chance = chance
        self._entries: dict[str, Entry] = {}
        self._local: dict[str, Entry] = {}
        self._per_key: Counter[str] = Counter()
        self._renewals = TimeHeap[str]()
        self._deadlines = TimeHeap[str]()
        self._doubts: dict[str, Doubt] = {}
        self._undo = TimeHeap[str]()
        self._forget = TimeHeap[str]()

    # -- events --------------------------------------------------------------------------------

    def granted(self, request: Request, grant: Grant, sent_at: float) -> Entry:
        """Add a lease that the store granted; its request was sent at `sent_at`."""
        entry = Entry(
            request, grant.fence, self._deadline(request, sent_at), self.interval(request.ttl)
        )
        self._add(entry)
        self._renew_first(entry, sent_at)
        return entry

    def granted_locally(self, request: Request) -> Entry:
        """Add a local lease: the store was unavailable, and this process granted it."""
        entry = Entry(request, 0, math.inf, self.interval(request.ttl), local=True)
        self._add(entry)
        return entry

    def exchanged(self, entry: Entry, grant: Grant, sent_at: float) -> bool:
        """Turn a local lease into one that the store granted; False if it has ended meanwhile."""
        if self._entries.get(entry.id) is not entry:
            return False
        entry.local = False
        del self._local[entry.id]
        entry.fence = grant.fence
        entry.deadline = self._deadline(entry.request, sent_at)
        self._deadlines.set(entry.id, entry.deadline)
        self._renew_first(entry, sent_at)
        return True

    def became_local(self, entry: Entry, new_id: str) -> None:
        """Add an expired lease again as a local one, to be acquired later under a new id."""
        entry.request = replace(entry.request, id=new_id)
        entry.local, entry.fence, entry.deadline = True, 0, math.inf
        self._add(entry)

    def renamed(self, entry: Entry, new_id: str) -> None:
        """Give a local lease a new id, because the store may have seen the old one."""
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id], self._local[entry.id]
            entry.request = replace(entry.request, id=new_id)
            self._entries[new_id] = self._local[new_id] = entry

    def renewed(self, ids: Iterable[str], sent_at: float) -> None:
        """Extend the deadlines of leases that the store renewed; sent at `sent_at`."""
        for entry in self._found(ids):
            # Responses may arrive in the wrong order: the later request counts.
            entry.deadline = max(entry.deadline, self._deadline(entry.request, sent_at))
            self._deadlines.set(entry.id, entry.deadline)
            self._renewals.set(entry.id, sent_at + entry.every)

    def not_renewed(self, ids: Iterable[str], now: float) -> None:
        """Make leases due again at once: their renewal failed, or was not answered."""
        for entry in self._found(ids):
            self._renewals.set(entry.id, now)

    def gone(self, ids: Iterable[str]) -> list[Entry]:
        """Remove leases that the store no longer has; returns those that were held here."""
        return [self._remove(entry) for entry in self._found(ids)]

    def released(self, lease_id: str) -> Entry | None:
        """Remove a lease that its holder released; None if it had ended already."""
        entry = self._entries.get(lease_id)
        return None if entry is None else self._remove(entry)

    def doubted(self, request: Request, now: float, *, unanswered: bool = False) -> None:
        """Add a lease in doubt, to be released; `unanswered` if its acquire was not answered."""
        self._doubts[request.id] = Doubt(request, unanswered)
        self._undo.set(request.id, now)
        # However late the store received the request, the lease has expired there by then.
        self._forget.set(request.id, now + 2 * request.ttl)

    def undone(self, lease_id: str, ended: bool, now: float) -> None:
        """Settle a lease in doubt after its release; `ended` if the store had it.

        A lease that was not found is released again later, if its acquire may still arrive.
        """
        doubt = self._doubts.get(lease_id)
        if doubt is None:
            return
        if doubt.unanswered and not ended and doubt.missed < len(RELEASE_AGAIN):
            self._undo.set(lease_id, now + RELEASE_AGAIN[doubt.missed])
            doubt.missed += 1
            return
        del self._doubts[lease_id]
        self._undo.drop(lease_id)
        self._forget.drop(lease_id)

    # -- work ----------------------------------------------------------------------------------

    def due(self, now: float) -> list[list[Request]]:
        """Return the leases to renew now, in batches; not due again before their response."""
        if self._renewals.first() > now:
            return []
        ids = self._renewals.pop(now + TOGETHER * self._policy.renew_every)
        return self._batches(self._entries[each].request for each in ids)

    def expired(self, now: float) -> list[Entry]:
        """Remove and return the leases whose deadline has passed."""
        return [self._remove(self._entries[each]) for each in self._deadlines.pop(now)]

    def to_release(self, now: float) -> list[list[Request]]:
        """Return the leases in doubt that are to be released now, in batches."""
        return self._batches(
            doubt.request for each, doubt in self._doubts.items() if self._undo.get(each) <= now
        )

    def left_to_time(self, now: float) -> int:
        """Forget the leases in doubt that must have expired in the store; returns how many."""
        found = self._forget.pop(now)
        for each in found:
            self._undo.drop(each)
            del self._doubts[each]
        return len(found)

    def close(self) -> list[Entry]:
        """Remove and return all held leases."""
        return [self._remove(entry) for entry in list(self._entries.values())]

    def next_due(self) -> float:
        """The time of the next renewal."""
        return self._renewals.first()

    def next_undo(self) -> float:
        """The time of the next release of a lease in doubt."""
        return self._undo.first()

    def next_deadline(self) -> float:
        """The first deadline of a held lease."""
        return self._deadlines.first()

    # -- state ---------------------------------------------------------------------------------

    def local(self) -> list[Entry]:
        """Return the local leases."""
        return list(self._local.values())

    def has_local_room(self, request: Request) -> bool:
        """Whether this process may hold one more lease of the key while the store is down."""
        limit = self._policy.local_limit
        return self._per_key[request.key] < (request.limit if limit is None else limit)

    @property
    def doubts(self) -> int:
        """How many leases are in doubt."""
        return len(self._doubts)

    def margin(self, ttl: float) -> float:
        """Seconds by which a lease's deadline is earlier than its expiry in the store."""
        margin = self._policy.margin
        return min(5.0, ttl / 10) if margin is None else margin

    def interval(self, ttl: float) -> float:
        """Seconds between the renewals of a lease with this ttl."""
        return min(self._policy.renew_every, ttl / 3)

    def __len__(self) -> int:
        return len(self._entries)

    # -- helpers -------------------------------------------------------------------------------

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

    def _found(self, ids: Iterable[str]) -> Iterator[Entry]:
        return (entry for each in ids if (entry := self._entries.get(each)) is not None)

    def _batches(self, requests: Iterable[Request]) -> list[list[Request]]:
        todo, size = list(requests), self._policy.batch
        return [todo[start : start + size] for start in range(0, len(todo), size)]
