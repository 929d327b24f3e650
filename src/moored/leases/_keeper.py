"""The background work of a client: renew and release leases, and notify holders of lost ones.

One timer is set to the first deadline and does no I/O, so that holders are notified in time even
while a call to the store hangs. One task wakes up when calls to the store are due, makes them in
batches, and sleeps again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Sequence

from moored.kernel import Backoff, Clock, Context, Timers, counted, describe

from ._errors import LeaseLost, LossReason, StoreUnavailable
from ._lease import Lease
from ._lease_table import Entry, LeaseTable
from ._store import Request
from ._store_calls import StoreCalls, StoreKnownDown

__all__ = ["Keeper"]

log = logging.getLogger("moored.leases")


#: First and longest delay after a failed round, in seconds.
RETRY = (0.1, 2.0)
#: Seconds between two exchanges of local leases: all clients start exchanging when the store is
#: back, and the holders of refused leases should not all stop at once.
EXCHANGE_EVERY = 0.01


class Keeper:
    """Renews, releases and exchanges the leases of one client."""

    def __init__(self, table: LeaseTable, calls: StoreCalls) -> None:
        self.table = table
        self.calls = calls
        self.clock = calls.clock
        self.counts = calls.counts
        calls.on_recovery = self.recovered
        self._leases: dict[Entry, Lease] = {}
        self._wake = asyncio.Event()
        self._sleeps_until = math.inf
        self._timers = Timers(calls.clock)
        # `on_lost` callbacks run in this context, not in that of the caller that set the timer.
        self._context = contextvars.copy_context()
        self._backoff = Backoff(*RETRY, jitter=0.25, clock=calls.clock)
        self._not_before = 0.0

    # -- calls by the client and by leases -----------------------------------------------------

    def keep(self, entry: Entry) -> Lease:
        """Start renewing a lease, and return the holder's object."""
        lease = Lease(self, entry)
        self._leases[entry] = lease
        self._arm()
        self._wake_for(self.table.next_due())
        if entry.local:
            self._wake.set()
        return lease

    async def renew_now(self, lease: Lease) -> None:
        """Renew one lease ahead of its schedule."""
        if not lease._entry.local:
            await self._renew([lease._entry.request])

    async def release(self, entry: Entry) -> None:
        """Release a lease in the store, at once or later."""
        self.table.released(entry.id)
        self._leases.pop(entry, None)
        self.counts["released"] += 1
        if entry.local:
            return
        try:
            await self._release([entry.request])
        except StoreUnavailable:
            self.doubt(entry.request)
        except BaseException:
            self.doubt(entry.request)
            raise

    def doubt(self, request: Request, *, unanswered: bool = False) -> None:
        """Release a lease that the store may hold, as soon as the store answers."""
        self.table.doubted(request, self.clock.monotonic(), unanswered=unanswered)
        self._wake.set()

    async def close(self) -> None:
        """Notify every holder, and release all leases if the store answers."""
        self._timers.cancel_all()
        entries = self.table.close()
        self._lose(entries, "closed", "the client was closed")
        for entry in entries:
            if not entry.local:
                self.table.doubted(entry.request, self.clock.monotonic())
        try:
            await self._release_doubts()
        except Exception as error:
            log.warning(
                "%s: could not release %s, which will expire in the store: %s",
                self.calls.place,
                counted(self.table.doubts, "lease"),
                describe(error),
            )
        self.counts["left_to_time"] += self.table.doubts

    # -- deadlines: one timer ------------------------------------------------------------------

    def _arm(self) -> None:
        first, set_for = self.table.next_deadline(), self._timers.at("deadline")
        # A timer that is set too early finds no expired lease, and is set again.
        if first < (math.inf if set_for is None else set_for):
            self._context.run(self._timers.set, "deadline", first, self._expire)

    def _expire(self) -> None:
        entries = self.table.expired(self.clock.monotonic())
        for entry in entries:
            # A renewal may still be in flight, and would extend a lease without a holder.
            self.doubt(entry.request)
        self._lose(self._keep_locally(entries), "expired", "not renewed before the deadline")
        self._arm()

    def _keep_locally(self, entries: Sequence[Entry]) -> list[Entry]:
        """In an outage, or just after it, turn expired leases into local ones; returns those lost.

        Losing all of them would close what they protect in every process at once.
        """
        in_outage = self.calls.health.in_outage(self.clock.monotonic())
        if not in_outage or self.calls.policy.on_unavailable != "local":
            return list(entries)
        lost: list[Entry] = []
        for entry in entries:
            if entry.request.limit > 1 and self.table.has_local_room(entry.request):
                self.table.became_local(entry, new_id(self.clock))
                self.counts["local_granted"] += 1
            else:
                lost.append(entry)
        if kept := len(entries) - len(lost):
            text = f"{counted(kept, 'lease')} expired in the outage; kept as local leases"
            log.warning("%s: %s", self.calls.place, text)
            self.calls.record(text, "info", self.calls.health.error)
        return lost

    def _lose(self, entries: Sequence[Entry], reason: LossReason, why: str) -> None:
        """Notify the holders of lost leases; then log one line for all of them."""
        for entry in entries:
            if (lease := self._leases.pop(entry, None)) is not None:
                lease._lose(self._loss(entry, reason, why))
        if entries and reason != "closed":
            keys = Counter(repr(entry.request.key) for entry in entries).most_common(3)
            shown = ", ".join(f"{count} of {key}" for key, count in keys)
            lost = counted(len(entries), "lease")
            log.warning("%s: %s lost (%s): %s", self.calls.place, lost, shown, why)

    def _loss(self, entry: Entry, reason: LossReason, why: str) -> LeaseLost:
        self.counts[f"lost_{reason}"] += 1
        text = f"the lease of {entry.request.key!r} (fence {entry.fence}) is lost: {why}"
        cause = self.calls.health.error if reason == "expired" else None
        self.calls.record(text, "failure", cause)
        return LeaseLost(text, key=entry.request.key, reason=reason)

    # -- calls to the store: one task ----------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Renew, release and exchange leases until the client is closed."""
        ctx.started()
        while True:
            await self._sleep()
            try:
                await self._round()
            except StoreUnavailable:
                delay = self._backoff.fail()
                if not self.calls.health.up:  # another call may have ended the outage
                    self._not_before = self.clock.monotonic() + delay
            except Exception as error:
                # Unless a later round succeeds, the leases expire and their holders are notified.
                self._not_before = self.clock.monotonic() + self._backoff.fail()
                log.error("%s: leases cannot be renewed: %s", self.calls.place, describe(error))
                ctx.record("leases cannot be renewed", kind="failure", cause=error)
            else:
                self._backoff.succeed()

    def recovered(self) -> None:
        """Make the calls that are due at once, without backoff: the store answers again."""
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
        batches = self.table.due(self.clock.monotonic())
        outcomes = await asyncio.gather(*map(self._renew, batches), return_exceptions=True)
        if failed := [each for each in outcomes if isinstance(each, BaseException)]:
            raise failed[0]
        await self._release_doubts()
        await self._exchange()

    async def _renew(self, requests: Sequence[Request]) -> None:
        sent_at = self.clock.monotonic()
        ids = [request.id for request in requests]
        timeout = min(request.ttl for request in requests) / 3
        try:
            answers = await self.calls.do(
                "renew", lambda: self.calls.store.renew(requests), timeout=timeout
            )
        except BaseException:
            self.table.not_renewed(ids, self.clock.monotonic())
            raise
        kept = [each for each, alive in zip(ids, answers, strict=True) if alive]
        gone = [each for each, alive in zip(ids, answers, strict=True) if not alive]
        self.table.renewed(kept, sent_at)
        self.counts["renewed"] += len(kept)
        self._lose(self.table.gone(gone), "gone", "no longer in the store")
        self._arm()

    async def _release_doubts(self) -> None:
        self.counts["left_to_time"] += self.table.left_to_time(self.clock.monotonic())
        for batch in self.table.to_release(self.clock.monotonic()):
            answers = await self._release(batch)
            self.counts["undone"] += sum(answers)
            for request, ended in zip(batch, answers, strict=True):
                self.table.undone(request.id, ended, self.clock.monotonic())

    async def _release(self, requests: Sequence[Request]) -> Sequence[bool]:
        return await self.calls.do("release", lambda: self.calls.store.release(requests))

    async def _exchange(self) -> None:
        """Acquire one local lease in the store; the next one follows in the next round."""
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
            # The store may grant this id later, with an unknown deadline: use a new id.
            self.doubt(request, unanswered=True)
            self.table.renamed(entry, new_id(self.clock))
            raise
        if grant is None:
            if self.table.released(request.id) is not None:
                self._lose([entry], "refused", "the store is back, and the limit is reached")
        elif self.table.exchanged(entry, grant, sent_at):
            self.counts["exchanged"] += 1
            self._arm()
        else:
            self.doubt(request)


def new_id(clock: Clock) -> str:
    """Return a new unique lease id."""
    return f"{clock.random.getrandbits(128):032x}"
