"""Every call of the store goes through here: it is timed, counted, and tells whether it is up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moored.kernel import Backoff, Clock, Recorder, describe, duration

from ._counts import Counts
from ._errors import StoreMisconfigured, StoreUnavailable
from ._health import StoreHealth
from ._policy import Policy
from ._store import Store

__all__ = ["StoreCalls", "StoreKnownDown"]

log = logging.getLogger("moored.leases")

T = TypeVar("T")

#: To connect may mean to make a table first, which takes longer than an ordinary call.
TIMES_TO_OPEN = 3
#: An outage is looked at this soon at first, and this rarely at last.
RETRY = (0.1, 2.0)


class StoreKnownDown(StoreUnavailable):
    """The store is known to be down, so this call was not made at all."""


class StoreCalls:
    """Calls a store, one at a time in an outage; an unanswered call is `StoreUnavailable`."""

    def __init__(
        self,
        store: Store,
        *,
        place: str,
        name: str,
        policy: Policy,
        clock: Clock,
        recorder: Recorder,
        counts: Counts,
    ) -> None:
        self.store = store
        self.place = place
        self.name = name
        self.policy = policy
        self.clock = clock
        self.recorder = recorder
        self.counts = counts
        #: Called when the store answers again.
        self.on_recovery: Callable[[], None] = _nothing
        self._opened = False
        self._refusal: StoreMisconfigured | None = None
        backoff = Backoff(*RETRY, jitter=0.25, clock=clock)
        self.health = StoreHealth(backoff, policy.timeout)

    @property
    def opened(self) -> bool:
        """Whether the store was reached once."""
        return self._opened

    async def open(self, *, patience: float | None = None) -> None:
        """Connect the store."""
        patience = patience or TIMES_TO_OPEN * self.policy.timeout
        try:
            await self._watched("open", self.store.open, patience)
        except StoreMisconfigured as error:
            self._refusal = error
            raise
        self._opened = True

    async def do(
        self, what: str, call: Callable[[], Awaitable[T]], *, patience: float | None = None
    ) -> T:
        """Make a call; raises `StoreUnavailable` at once while the store is known to be down."""
        if not self._opened:
            raise self._still_down() if self._refusal is None else self._refusal
        return await self._watched(what, call, min(self.policy.timeout, patience or 1e9))

    async def close(self) -> None:
        """Let go of the store, whatever it says."""
        try:
            async with asyncio.timeout(self.policy.timeout):
                await self.store.close()
        except Exception as error:
            log.warning("%s: the store could not be closed: %s", self.place, describe(error))

    async def _watched(self, what: str, call: Callable[[], Awaitable[T]], patience: float) -> T:
        if not self.health.admit(self.clock.monotonic()):
            raise self._still_down()
        self.counts.store_calls += 1
        try:
            async with asyncio.timeout(patience):
                result = await call()
        except TimeoutError:
            error = StoreUnavailable(
                f"{what} was not answered by {self.place} within {patience:g} s; "
                "it may have been done all the same"
            )
            self._failed(error)
            raise error from None
        except StoreUnavailable as error:
            self._failed(error)
            raise
        except StoreMisconfigured:
            # It said no, so it answers: going on without it would hide the mistake.
            self._worked()
            raise
        self._worked()
        return result

    def _still_down(self) -> StoreKnownDown:
        now = self.clock.monotonic()
        error = StoreKnownDown(
            f"{self.place} has not answered for {duration(now - self.health.since)}; "
            f"it is asked again in {duration(self.health.retry_at - now)}"
        )
        error.__cause__ = self.health.error
        return error

    def _failed(self, error: StoreUnavailable) -> None:
        self.counts.store_failures += 1
        if not self.health.failed(error, self.clock.monotonic()):
            return
        self.counts.outages += 1
        so = "refusing new leases"
        if self.policy.on_unavailable == "local":
            so = "going on with limits of this process alone, and refusing exclusive leases"
        log.warning("%s: no answer, %s: %s", self.place, so, describe(error))
        text = f"the store does not answer; {so}"
        self.recorder.record(self.name, text, kind="failure", cause=error)

    def _worked(self) -> None:
        outage = self.health.worked(self.clock.monotonic())
        if outage is None:
            return
        log.warning("%s: it answers again, after %s", self.place, duration(outage))
        text = f"the store answers again, after {duration(outage)}"
        self.recorder.record(self.name, text, kind="state")
        self.on_recovery()


def _nothing() -> None:
    pass
