"""Calls to the store, each with a timeout; they are counted and detect outages."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from moored.kernel import Backoff, Clock, Recorder, describe, duration

from ._errors import StoreMisconfigured, StoreUnavailable
from ._health import StoreHealth
from ._policy import Policy
from ._store import Store

__all__ = ["StoreCalls", "StoreKnownDown"]

log = logging.getLogger("moored.leases")

T = TypeVar("T")

#: Opening may create tables first, so it gets this many times the timeout of an ordinary call.
TIMES_TO_OPEN = 3
#: First and longest delay between attempts in an outage, in seconds.
RETRY = (0.1, 2.0)


class StoreKnownDown(StoreUnavailable):
    """The store is known to be down, so the call was not sent."""


@dataclass(eq=False)
class StoreCalls:
    """Calls a store. A call that times out raises `StoreUnavailable`; while the store is down,
    calls fail at once, except for one attempt at a time to find out whether it is back."""

    store: Store
    place: str
    name: str
    policy: Policy
    clock: Clock
    recorder: Recorder
    #: By the names of `LeaseStatistics`.
    counts: Counter[str] = field(default_factory=Counter)
    #: Called when the store answers again after an outage.
    on_recovery: Callable[[], None] = lambda: None
    #: Whether the store has been opened.
    opened: bool = False
    _misconfigured: StoreMisconfigured | None = None

    def __post_init__(self) -> None:
        backoff = Backoff(*RETRY, jitter=0.25, clock=self.clock)
        self.health = StoreHealth(backoff, self.policy.timeout)

    async def open(self, *, timeout: float | None = None) -> None:
        """Open the store."""
        try:
            await self._call(
                "open", self.store.open, timeout or TIMES_TO_OPEN * self.policy.timeout
            )
        except StoreMisconfigured as error:
            self._misconfigured = error
            raise
        self.opened = True

    async def do(
        self, what: str, call: Callable[[], Awaitable[T]], *, timeout: float = math.inf
    ) -> T:
        """Make a call; raises `StoreKnownDown` at once while the store is known to be down.

        `timeout` may shorten the policy's timeout.
        """
        await asyncio.sleep(0)  # a caller that retries at once must not stop the loop
        if not self.opened:
            raise self._misconfigured or self._still_down()
        return await self._call(what, call, min(self.policy.timeout, timeout))

    async def close(self) -> None:
        """Close the store; failures are logged."""
        try:
            async with asyncio.timeout(self.policy.timeout):
                await self.store.close()
        except Exception as error:
            log.warning("%s: the store could not be closed: %s", self.place, describe(error))

    def record(self, text: str, kind: str, cause: BaseException | None = None) -> None:
        """Record an event of the client."""
        self.recorder.record(self.name, text, kind=kind, cause=cause)

    async def _call(self, what: str, call: Callable[[], Awaitable[T]], timeout: float) -> T:
        if not self.health.admit(self.clock.monotonic()):
            raise self._still_down()
        self.counts["store_calls"] += 1
        try:
            async with asyncio.timeout(timeout):
                result = await call()
        except TimeoutError:
            error = StoreUnavailable(
                f"{self.place} did not answer {what} within {timeout:g} s; "
                "the store may have carried it out"
            )
            self._failed(error)
            raise error from None
        except StoreUnavailable as error:
            self._failed(error)
            raise
        except StoreMisconfigured:
            # The store answered, so this is no outage: local leases would hide the mistake.
            self._worked()
            raise
        self._worked()
        return result

    def _still_down(self) -> StoreKnownDown:
        now = self.clock.monotonic()
        error = StoreKnownDown(
            f"{self.place} has not answered for {duration(now - self.health.since)}; "
            f"next attempt in {duration(self.health.retry_at - now)}"
        )
        error.__cause__ = self.health.error
        return error

    def _failed(self, error: StoreUnavailable) -> None:
        self.counts["store_failures"] += 1
        if not self.health.failed(error, self.clock.monotonic()):
            return
        self.counts["outages"] += 1
        action = "refusing new leases"
        if self.policy.on_unavailable == "local":
            action = "applying limits within this process only, and refusing exclusive leases"
        log.warning("%s: store unavailable, %s: %s", self.place, action, describe(error))
        text = f"store unavailable; {action}"
        self.record(text, "failure", error)

    def _worked(self) -> None:
        outage = self.health.worked(self.clock.monotonic())
        if outage is None:
            return
        text = f"the store answers again, after {duration(outage)}"
        log.warning("%s: %s", self.place, text)
        self.record(text, "state")
        self.on_recovery()
