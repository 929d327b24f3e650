"""A rate that many processes share, seen from one of them.

The store gives tokens by its own clock, and a token is used a little later: its answer travels,
and a batch is used up bit by bit. Seen from outside, tokens that were given evenly may therefore
be used together. So a token has a short life, counted from the moment at which it was asked for,
and the store is given a burst that is smaller by what the rate gives in that time: what is used in
a window of w seconds was given in w + hold, hence at most rate·(w + hold) + (burst - rate·hold).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque

from moored.kernel import SingleFlight, duration, refuse, unmet

from . import _gcra
from ._errors import StoreUnavailable
from ._policy import check_key
from ._store_calls import StoreCalls

__all__ = ["RateLimit", "TokenCache"]

log = logging.getLogger("moored.leases")

#: To hold tokens for longer only keeps them from others.
LONGEST_HOLD = 1.0
_LEAST_BURST = (
    "at least 2: a token is used a moment after it was given, and that moment is paid for out of "
    "the burst"
)
#: How often one `take` asks the store before it lets its caller wait.
ASKS = 3


class TokenCache:
    """Tokens that were fetched and not yet used; each is worthless after its time."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()

    def put(self, tokens: int, until: float) -> None:
        """Keep tokens until then."""
        if tokens:
            self._tokens.append((until, tokens))

    def drop_stale(self, now: float) -> int:
        """Throw away what is worthless now; returns how many that were."""
        before = self.count
        self._tokens = deque((until, n) for until, n in self._tokens if until > now)
        return before - self.count

    def spend(self, tokens: int) -> bool:
        """Use so many, those first that would be worthless first; or none, if there are fewer."""
        if tokens > self.count:
            return False
        while tokens:
            until, there = self._tokens.popleft()
            used = min(tokens, there)
            tokens -= used
            if there > used:
                self._tokens.appendleft((until, there - used))
        return True

    @property
    def count(self) -> int:
        """How many there are."""
        # A copy first: whoever reads statistics may be in another thread.
        return sum(tokens for _, tokens in tuple(self._tokens))


class RateLimit:
    """A limit of `rate` per second with at most `burst` at once, shared by all its users.

    `take()` says how long to wait, and never waits itself; `wait()` does.
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
        #: Seconds for which a token can be used after it was asked for.
        self.hold = min(LONGEST_HOLD, max(1, burst // 2) / rate) if hold is None else hold
        #: The burst that the store is given.
        self.store_burst = burst - math.ceil(self.hold * rate - 1e-9)
        refuse(f"rate_limit {key!r}", self._too_small())
        self._calls = calls
        self._clock = calls.clock
        self._counts = calls.counts
        self._local_rate = rate if local_rate is None else local_rate
        self._local_full_at: float | None = None
        self._full_at: float | None = None
        self._seen: float | None = None
        self._cache = TokenCache()
        self._wanted = 0
        self._next_at = -math.inf
        self._flight = SingleFlight()
        self._turn = asyncio.Lock()
        self._warned = False

    async def take(self, n: int = 1) -> float:
        """Take n tokens, or none: returns 0.0 if they were taken, else the seconds to wait.

        Whoever is told to wait comes back and asks again; nothing is reserved.
        """
        self._check(n)
        self._wanted += n
        try:
            return await self._take(n)
        finally:
            self._wanted -= n

    async def wait(self, n: int = 1) -> None:
        """Take n tokens, and wait for them as long as it takes; who came first is served first."""
        self._check(n)
        # Counted while it waits for its turn, so that the one before it fetches for both.
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
        """How many could be taken at once, as far as this client knows: others take some too."""
        now = self._clock.monotonic()
        if self._next_at > now:
            return float(self._cache.count)
        ahead = max(0.0, (self._seen or now) - now)
        return self._cache.count + max(0.0, self.store_burst - ahead * self.rate)

    async def _take(self, n: int) -> float:
        try:
            return await self._take_from_store(n)
        except StoreUnavailable:
            if not self._local_rate:
                raise
            return self._take_locally(n)

    async def _take_from_store(self, n: int) -> float:
        for _ in range(ASKS):
            if (seconds := self._spend(n)) is not None:
                return seconds
            await self._flight.do("tokens", self._fetch)
        seconds = self._spend(n)
        return 1 / self.rate if seconds is None else seconds

    def _spend(self, n: int) -> float | None:
        """0.0 if there are enough here, a wait if the store has none, None to ask it."""
        now = self._clock.monotonic()
        self._counts.tokens_stale += self._cache.drop_stale(now)
        missing = n - self._cache.count
        if missing <= 0:
            if seconds := self._pace(n, now):
                return seconds
            self._cache.spend(n)
            self._counts.tokens += n
            return 0.0
        if self._next_at <= now:
            return None
        return self._next_at - now + (missing - 1) / self.rate

    async def _fetch(self) -> None:
        # Whoever waits in this process is asked for together: one call at a time, for all.
        tokens = max(self.batch, self._wanted - self._cache.count)
        tokens = min(tokens, self.store_burst)
        sent_at = self._clock.monotonic()
        taken = await self._calls.do(
            "take",
            lambda: self._calls.store.take(
                self.key, rate=self.rate, burst=self.store_burst, tokens=tokens
            ),
        )
        self._cache.put(taken.granted, sent_at + self.hold)
        self._seen, _ = _gcra.take(
            self._seen, sent_at, rate=self.rate, burst=self.store_burst, tokens=taken.granted
        )
        # Nobody can get one earlier than this, so there is no use in asking before.
        self._next_at = sent_at + taken.wait if taken.wait else -math.inf
        self._warn_if_slow(self._clock.monotonic() - sent_at)

    def _warn_if_slow(self, took: float) -> None:
        if took < self.hold or self._warned:
            return
        self._warned = True
        log.warning(
            "rate limit %r: the store took %.3f s to answer, and a token is good for %.3f s only, "
            "so its tokens are lost; allow a greater burst than %d, or a longer hold",
            self.key,
            took,
            self.hold,
            self.burst,
        )

    def _take_locally(self, n: int) -> float:
        now, rate = self._clock.monotonic(), self._local_rate
        full_at, free = _gcra.take(self._local_full_at, now, rate=rate, burst=self.burst, tokens=n)
        if free.granted < n:
            return free.wait + (n - free.granted - 1) / rate
        if seconds := self._pace(n, now):
            return seconds
        self._local_full_at = full_at
        self._counts.tokens_local += n
        return 0.0

    def _pace(self, n: int, now: float) -> float:
        """0.0 if this process may use so many now, whoever gave them; else the seconds to wait.

        What the store gives keeps to the rate, and so does what is taken locally in its outage;
        where the one follows on the other, both together need not.
        """
        full_at, free = _gcra.take(self._full_at, now, rate=self.rate, burst=self.burst, tokens=n)
        if free.granted < n:
            return free.wait + (n - free.granted - 1) / self.rate
        self._full_at = full_at
        return 0.0

    def _check(self, n: int) -> None:
        if not 1 <= n <= self.store_burst:
            raise ValueError(
                f"n={n!r} must be between 1 and {self.store_burst}: the burst of {self.burst}, "
                f"less what the rate gives in the {self.hold:g} s for which tokens are held"
            )

    def _too_small(self) -> list[str]:
        if self.store_burst >= self.batch:
            return []
        return [
            f"burst={self.burst} leaves {self.store_burst} at once, because tokens are held for "
            f"{self.hold:g} s at {self.rate:g}/s; it must leave the batch of {self.batch}: "
            "allow a greater burst, a smaller batch or a shorter hold"
        ]

    def __repr__(self) -> str:
        wait = max(0.0, self._next_at - self._clock.monotonic())
        state = f"next in {duration(wait)}" if wait else f"{self._cache.count} tokens here"
        return f"<RateLimit {self.key!r}: {self.rate:g}/s, burst {self.burst}, {state}>"
