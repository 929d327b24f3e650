"""A rate limit that many processes share, as one process uses it.

The store grants tokens by its own clock, and a token is used later: the response takes time, and a
batch is used bit by bit. So tokens that were granted evenly may be used together. Therefore the
first token of a call expires `hold` seconds after the call, each further one 1/rate later, and the
store is given a burst that is smaller by rate·hold.

Take the tokens that are used in a window of w seconds. If the first of them was granted d seconds
before the window, at most rate·(w + d) + (burst - rate·hold) were granted since then, and those of
its call that have expired, at least rate·(d - hold), were not used: so at most rate·w + burst were.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_right

from moored.kernel import SingleFlight, duration, refuse, unmet

from . import _gcra
from ._errors import StoreUnavailable
from ._policy import check_key
from ._store_calls import StoreCalls

__all__ = ["RateLimit", "TokenCache"]

log = logging.getLogger("moored.leases")

#: The longest default hold: tokens that one process holds are not available to the others.
LONGEST_HOLD = 1.0
_LEAST_BURST = "at least 2: holding a token until it is used costs a part of the burst"
#: How many times one `take` calls the store before it returns a wait.
ATTEMPTS = 3


class TokenCache:
    """Tokens that were fetched and not yet used, with their expiry times."""

    def __init__(self) -> None:
        self._expiries: list[float] = []

    def put(self, tokens: int, until: float, every: float) -> None:
        """Add tokens: the first one expires at `until`, each further one `every` seconds later."""
        expiries = [until + number * every for number in range(tokens)]
        self._expiries = sorted(self._expiries + expiries)

    def drop_stale(self, now: float) -> int:
        """Remove expired tokens; returns how many."""
        stale = bisect_right(self._expiries, now)
        del self._expiries[:stale]
        return stale

    def spend(self, tokens: int) -> bool:
        """Use tokens, those first that expire first; False, using none, if there are too few."""
        if tokens > self.count:
            return False
        del self._expiries[:tokens]
        return True

    @property
    def count(self) -> int:
        """How many tokens there are, expired ones included."""
        return len(self._expiries)


class RateLimit:
    """A limit of `rate` tokens per second with a burst, shared by all processes.

    `take()` returns how long to wait, and does not wait itself; `wait()` does.
    """

    def __init__(
        self,
        calls: StoreCalls,
        key: str,
        *,
        rate: float,
        burst: int | None,
        batch: int,
        hold: float | None,
        local_rate: float | None,
    ) -> None:
        if burst is None:
            burst = max(2, round(rate)) if 0 < rate < math.inf else 2
        good_hold = hold is None or 0 < hold < math.inf
        good_local = 0 <= (local_rate or 0) < math.inf
        mistakes = unmet(
            ("rate", rate, 0 < rate < math.inf, "more than 0 per second, and finite"),
            ("burst", burst, burst >= 2, _LEAST_BURST),
            ("batch", batch, batch >= 1, "at least 1"),
            ("hold", hold, good_hold, "more than 0 seconds, and finite, or None"),
            ("local_rate", local_rate, good_local, "at least 0 per second, or None"),
        )
        refuse(f"rate_limit {key!r}", [*check_key(key), *mistakes])
        self.key = key
        self.rate = rate
        self.burst = burst
        self.batch = batch
        #: Seconds for which the first token of a call can be used after it was requested.
        self.hold = min(LONGEST_HOLD, max(1, burst // 2) / rate) if hold is None else hold
        #: The burst that the store applies: `burst`, less rate·hold.
        self.store_burst = burst - math.ceil(self.hold * rate - 1e-9)
        refuse(f"rate_limit {key!r}", self._too_small())
        self._calls = calls
        self._clock = calls.clock
        self._counts = calls.counts
        self._local_rate = rate if local_rate is None else local_rate
        # GCRA states (see `_gcra`): of local tokens in an outage, and of all tokens that this
        # process used.
        self._local_full_at: float | None = None
        self._used_full_at: float | None = None
        self._cache = TokenCache()
        self._wanted = 0
        self._next_at = -math.inf
        self._flight = SingleFlight()
        self._turn = asyncio.Lock()
        # How long the last call took, and how many of its tokens had expired by then.
        self._took, self._late = 0.0, 0
        self._warned = False

    async def take(self, n: int = 1) -> float:
        """Take n tokens, or none: returns 0.0 if they were taken, else the seconds to wait.

        No tokens are reserved: after the wait, the caller calls `take` again.
        """
        self._check(n)
        self._wanted += n
        try:
            return await self._take(n)
        finally:
            self._wanted -= n

    async def wait(self, n: int = 1) -> None:
        """Take n tokens, waiting for them without limit; waiters are served in order."""
        self._check(n)
        # Counted while it waits for its turn, so that the waiter before it fetches for both.
        self._wanted += n
        try:
            async with self._turn:
                while True:
                    if not (seconds := await self._take(n)):
                        return
                    await asyncio.sleep(seconds)
        finally:
            self._wanted -= n

    @property
    def left(self) -> float:
        """An estimate of the tokens that can be taken now: other processes take some, too."""
        now = self._clock.monotonic()
        if self._next_at > now:
            return float(self._cache.count)
        ahead = max(0.0, (self._used_full_at or now) - now)
        return max(float(self._cache.count), self.store_burst - ahead * self.rate)

    async def _take(self, n: int) -> float:
        try:
            return await self._take_from_store(n)
        except StoreUnavailable:
            if not self._local_rate:
                raise
            return self._take_locally(n)

    async def _take_from_store(self, n: int) -> float:
        for _ in range(ATTEMPTS):
            if (seconds := self._spend(n)) is not None:
                return seconds
            await self._flight.do("tokens", self._fetch)
        seconds = self._spend(n)
        return 1 / self.rate if seconds is None else seconds

    def _spend(self, n: int) -> float | None:
        """Use cached tokens: 0.0 if done, a wait if the store has none, None to call the store."""
        now = self._clock.monotonic()
        self._counts["tokens_stale"] += self._cache.drop_stale(now)
        missing = n - self._cache.count
        if missing <= 0:
            if seconds := self._pace(n, now):
                return seconds
            self._cache.spend(n)
            self._counts["tokens"] += n
            return 0.0
        if self._next_at <= now:
            return None
        return self._next_at - now + (missing - 1) / self.rate

    async def _fetch(self) -> None:
        # One call at a time fetches for all waiters of this process.
        tokens = max(self.batch, self._wanted - self._cache.count) + self._late
        tokens = min(tokens, self.store_burst)
        sent_at = self._clock.monotonic()
        taken = await self._calls.do(
            "take",
            lambda: self._calls.store.take(
                self.key, rate=self.rate, burst=self.store_burst, tokens=tokens
            ),
        )
        self._took = self._clock.monotonic() - sent_at
        self._late = max(0, math.floor((self._took - self.hold) * self.rate) + 1)
        self._cache.put(taken.granted, sent_at + self.hold, 1 / self.rate)
        # The store has no token before this time, so it is not called before.
        wait = taken.wait + self._late / self.rate
        self._next_at = sent_at + wait if taken.wait else -math.inf
        if self._too_slow and not self._warned:
            self._warned = True
            log.warning("rate limit %r: %s", self.key, self._too_slow)

    @property
    def _too_slow(self) -> str:
        """Why no token of the last call to the store could be used; empty if one could."""
        if self._late < self.store_burst:
            return ""
        return (
            f"the store took {self._took:.3f} s to answer, and all its tokens had expired: "
            f"configure a burst of at least {math.floor(self._took * self.rate) + 2}"
        )

    def _take_locally(self, n: int) -> float:
        now, rate = self._clock.monotonic(), self._local_rate
        full_at, free = _gcra.take(self._local_full_at, now, rate=rate, burst=self.burst, tokens=n)
        if free.granted < n:
            return free.wait + (n - free.granted - 1) / rate
        if seconds := self._pace(n, now):
            return seconds
        self._local_full_at = full_at
        self._counts["tokens_local"] += n
        return 0.0

    def _pace(self, n: int, now: float) -> float:
        """Apply the rate to all tokens that this process uses: 0.0, or the seconds to wait.

        The store's tokens keep to the rate, and so do the local ones of an outage. Both together
        might not, when an outage begins or ends.
        """
        full_at, free = _gcra.take(
            self._used_full_at, now, rate=self.rate, burst=self.burst, tokens=n
        )
        if free.granted < n:
            return free.wait + (n - free.granted - 1) / self.rate
        self._used_full_at = full_at
        return 0.0

    def _check(self, n: int) -> None:
        if not 1 <= n <= self.store_burst:
            raise ValueError(
                f"n={n!r} must be between 1 and {self.store_burst} (burst={self.burst} minus "
                f"hold={self.hold:g} s times rate={self.rate:g}): configure a greater burst"
            )

    def _too_small(self) -> list[str]:
        if self.store_burst >= self.batch:
            return []
        return [
            f"burst={self.burst} leaves {self.store_burst} at once: hold={self.hold:g} s at "
            f"rate={self.rate:g} reserves the rest, but batch={self.batch} tokens are fetched at "
            "once; configure a greater burst, a smaller batch or a shorter hold"
        ]

    def __repr__(self) -> str:
        wait = max(0.0, self._next_at - self._clock.monotonic())
        state = f"next in {duration(wait)}" if wait else f"{self._cache.count} tokens cached"
        return f"<RateLimit {self.key!r}: {self.rate:g}/s, burst {self.burst}, {state}>"
