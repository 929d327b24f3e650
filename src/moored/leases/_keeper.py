"""What goes on behind a client: leases are renewed, given back, exchanged, and their ends told.

Two things run, however many leases there are. One timer stands at the first deadline, and does
not wait for anything, so that a holder is told in time even while a call of the store hangs. One
task wakes when there is something to ask the store, asks it in batches, and sleeps again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from moored.kernel import Backoff, Clock, Context, Timers, counted, describe

from ._errors import LeaseLost, LossReason, StoreUnavailable
from ._lease import Lease
from ._lease_table import Entry, LeaseTable
from ._store import Request
from ._store_calls import StoreCalls, StoreKnownDown

__all__ = ["Keeper"]

log = logging.getLogger("moored.leases")

T = TypeVar("T")

#: Calls of the store at the same time, for one client.
AT_ONCE = 4
#: After a round that failed, the next one comes this soon at first, and this late at last.
RETRY = (0.1, 2.0)
#: Seconds between two exchanges: every client begins when the store is back, and what is refused is
#: given up by its holder, which should not happen to everything at once.
EXCHANGE_EVERY = 0.01


class Keeper:
    """Keeps the leases of one client."""

    def __init__(self, table: LeaseTable, calls: StoreCalls) -> None:
        self.table = table
        self.calls = calls
        self.clock = calls.clock
        self.counts = calls.counts
        calls.on_recovery = self.recovered
        self._policy = calls.policy
        self._name = calls.name
        self._place = calls.place
        self._recorder = calls.recorder
        self._leases: dict[Entry, Lease] = {}
        self._wake = asyncio.Event()
        self._sleeps_until = math.inf
        self._timers = Timers(calls.clock)
        # In which holders are told: not in the context of whoever set the timer.
        self._context = contextvars.copy_context()
        self._backoff = Backoff(*RETRY, jitter=0.25, clock=calls.clock)
        self._not_before = 0.0

    # -- leases come and go --------------------------------------------------------------------

    def keep(self, entry: Entry) -> Lease:
        """Hold a lease from now on."""
        lease = Lease(self, entry)
        self._leases[entry] = lease
        self._arm()
        self._wake_for(self.table.next_due())
        if entry.local:
            self._wake.set()
        return lease

    async def renew_now(self, lease: Lease) -> None:
        """Renew one lease outside its turn."""
        entry = lease._entry
        if not entry.local and self.table.get(entry.id) is entry:
            await self._renew([entry.request])

    async def release(self, entry: Entry) -> None:
        """Give back a lease that its holder has just ended."""
        self.table.released(entry.id)
        self._leases.pop(entry, None)
        self.counts.released += 1
        if entry.local:
            return
        try:
            await self._release([entry.request])
        except StoreUnavailable:
            self.doubt(entry.request)
        except BaseException:
            self.doubt(entry.request)
            raise

    def doubt(self, request: Request, *, asked: bool = False) -> None:
        """The store may have this lease and nobody wants it: give it back when that is possible."""
        self.table.doubted(request, self.clock.monotonic(), asked=asked)
        self._wake.set()

    async def close(self) -> None:
        """Tell every holder that it is over, and give everything back as far as it can be done."""
        self._timers.cancel_all()
        entries = self.table.close()
        self._lose(entries, "closed", "the client was closed")
        for entry in entries:
            if not entry.local:
                self.table.doubted(entry.request, self.clock.monotonic())
        try:
            await self._give_back()
        except Exception as error:
            left = self.table.doubts
            log.warning(
                "%s: %s could not be given back, and will end by themselves: %s",
                self._place,
                counted(left, "lease"),
                describe(error),
            )
        self.counts.left_to_time += self.table.doubts

    # -- deadlines: one timer ------------------------------------------------------------------

    def _arm(self) -> None:
        first, set_for = self.table.next_deadline(), self._timers.at("deadline")
        # A timer that is too early finds nothing, and is set again.
        if first < (math.inf if set_for is None else set_for):
            self._context.run(self._timers.set, "deadline", first, self._tell_expired)

    def _tell_expired(self) -> None:
        entries = self.table.expired(self.clock.monotonic())
        for entry in entries:
            # A renewal may be on its way still, and would keep for nobody what nobody has.
            self.doubt(entry.request)
        self._lose(self._not_kept(entries), "expired", "it could not be renewed in time")
        self._arm()

    def _not_kept(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the expired leases that end; in an outage, the others become local ones.

        To end them all would close what they protect everywhere at once, and open it again.
        """
        if self.calls.health.up or self._policy.on_unavailable != "local":
            return list(entries)
        ended: list[Entry] = []
        for entry in entries:
            request, most = entry.request, self._policy.local_limit
            room = self.table.count(request.key) < (request.limit if most is None else most)
            if request.limit > 1 and room:
                self.table.gone_local(entry, new_id(self.clock))
                self.counts.local_granted += 1
            else:
                ended.append(entry)
        if kept := len(entries) - len(ended):
            text = f"{counted(kept, 'lease')} expired in the outage; this process keeps them alone"
            log.warning("%s: %s", self._place, text)
            self._recorder.record(self._name, text, kind="info", cause=self.calls.health.error)
        return ended

    def _lose(self, entries: Sequence[Entry], reason: LossReason, why: str) -> None:
        """Tell the holders of these; then the log, in one line however many they are."""
        for entry in entries:
            if (lease := self._leases.pop(entry, None)) is not None:
                lease._lose(self._loss(entry, reason, why))
        if entries and reason != "closed":
            keys = Counter(repr(entry.request.key) for entry in entries).most_common(3)
            shown = ", ".join(f"{count} of {key}" for key, count in keys)
            lost = counted(len(entries), "lease")
            log.warning("%s: %s lost (%s): %s", self._place, lost, shown, why)

    def _loss(self, entry: Entry, reason: LossReason, why: str) -> LeaseLost:
        name = f"lost_{reason}"
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        text = f"the lease of {entry.request.key!r} (fence {entry.fence}) is lost: {why}"
        cause = self.calls.health.error if reason == "expired" else None
        self._recorder.record(self._name, text, kind="failure", cause=cause)
        return LeaseLost(text, key=entry.request.key, reason=reason)

    # -- the rest: one task --------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Renew, give back and exchange, for as long as the client lives."""
        ctx.started()
        while True:
            await self._sleep()
            try:
                await self._round()
            except StoreUnavailable:
                self._not_before = self.clock.monotonic() + self._backoff.fail()
            except Exception as error:
                # Whatever it is, leases are not renewed meanwhile: their holders will be told.
                self._not_before = self.clock.monotonic() + self._backoff.fail()
                log.error("%s: leases cannot be kept: %s", self._place, describe(error))
                ctx.record("leases cannot be kept", kind="failure", cause=error)
            else:
                self._backoff.succeed()

    def recovered(self) -> None:
        """The store answers again: do what is due, without waiting for the backoff."""
        self._not_before = 0.0
        self._wake.set()

    async def _sleep(self) -> None:
        while (delay := self._work_at() - self.clock.monotonic()) > 0:
            self._wake.clear()
            self._sleeps_until = self.clock.monotonic() + delay
            try:
                async with asyncio.timeout(None if delay == math.inf else delay):
                    await self._wake.wait()
            except TimeoutError:
                pass
            finally:
                self._sleeps_until = math.inf

    def _wake_for(self, when: float) -> None:
        if when < self._sleeps_until:
            self._wake.set()

    def _work_at(self) -> float:
        now = self.clock.monotonic()
        waiting = self.table.local() or not self.calls.opened
        work_at = now if waiting else min(self.table.next_due(), self.table.next_undo())
        if not self.calls.health.up:
            work_at = max(work_at, self.calls.health.retry_at)
        return max(work_at, self._not_before)

    async def _round(self) -> None:
        if not self.calls.opened:
            await self.calls.open()
        await self._renew_due()
        await self._give_back()
        await self._exchange()

    async def _renew_due(self) -> None:
        await _for_each(self._renew, self.table.due(self.clock.monotonic()))

    async def _renew(self, requests: Sequence[Request]) -> None:
        sent_at = self.clock.monotonic()
        ids = [request.id for request in requests]
        patience = min(request.ttl for request in requests) / 3
        try:
            answers = await self.calls.do(
                "renew", lambda: self.calls.store.renew(requests), patience=patience
            )
        except BaseException:
            self.table.not_renewed(ids, self.clock.monotonic())
            raise
        kept = [known for known, alive in zip(ids, answers, strict=True) if alive]
        gone = [known for known, alive in zip(ids, answers, strict=True) if not alive]
        self.table.renewed(kept, sent_at)
        self.counts.renewed += len(kept)
        self._lose(self.table.gone(gone), "gone", "the store does not know it any more")
        self._arm()

    async def _give_back(self) -> None:
        self.counts.left_to_time += len(self.table.left_to_time(self.clock.monotonic()))
        for batch in self.table.to_release(self.clock.monotonic()):
            answers = await self._release(batch)
            self.counts.undone += sum(answers)
            for request, ended in zip(batch, answers, strict=True):
                self.table.undone(request.id, ended, self.clock.monotonic())

    async def _release(self, requests: Sequence[Request]) -> Sequence[bool]:
        return await self.calls.do("release", lambda: self.calls.store.release(requests))

    async def _exchange(self) -> None:
        """Take the next local lease again; the one after it comes in the next round."""
        if (entry := next(iter(self.table.local()), None)) is not None:
            await self._exchange_one(entry)
            self._not_before = self.clock.monotonic() + EXCHANGE_EVERY

    async def _exchange_one(self, entry: Entry) -> None:
        request, sent_at = entry.request, self.clock.monotonic()
        try:
            grant = await self.calls.do("acquire", lambda: self.calls.store.acquire(request))
        except StoreKnownDown:
            raise
        except BaseException:
            # This id may live in the store from some time on that nobody knows: use another.
            self.doubt(request, asked=True)
            self.table.renamed(entry, new_id(self.clock))
            raise
        if grant is None:
            if self.table.released(request.id) is not None:
                self._lose([entry], "refused", "the store is back and has no room for it")
        elif self.table.exchanged(entry, grant, sent_at):
            self.counts.exchanged += 1
            self._arm()
        else:
            self.doubt(request)


async def _for_each(work: Callable[[T], Awaitable[None]], things: Sequence[T]) -> None:
    """A few at a time, all of them; then raise the first failure, if there was one."""
    failures: list[BaseException] = []
    for start in range(0, len(things), AT_ONCE):
        group = map(work, things[start : start + AT_ONCE])
        outcomes = await asyncio.gather(*group, return_exceptions=True)
        failures += [each for each in outcomes if isinstance(each, BaseException)]
    if failures:
        raise failures[0]


def new_id(clock: Clock) -> str:
    """An id that nobody else has, now or ever."""
    return f"{clock.random.getrandbits(128):032x}"
