"""The load of `moored soak`: callers on a pool, and what they measure."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import psycopg

from moored.kernel import Tasks, describe
from moored.reservoir import AsyncConnectionPool, ReservoirConfig

__all__ = ["Line", "three_lines"]

#: Seconds for which a caller holds its connection, and pauses between two checkouts.
HOLD, PAUSE = 0.02, 0.04
#: Seconds for filling the pool, and for waiting callers at the end, beside what rate and queue add.
FILL, GRACE = 30.0, 2.0
#: Samples in a second, and the most seconds between two kills.
SAMPLES, KILL_EVERY = 10, 10.0


class Sample(NamedTuple):
    """The ready connections at a moment, and what was counted until then."""

    elapsed: float
    ready: int = 0
    empty: int = 0
    checkouts: int = 0
    connects: int = 0


@dataclass(kw_only=True)
class Line:
    """One kind of load: its settings, and what was measured."""

    name: str
    config: ReservoirConfig
    callers: int
    seconds: float
    pause: float = PAUSE
    kill: bool = False
    waits: array[float] = field(default_factory=lambda: array("d"))
    samples: list[Sample] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    #: Errors that no kill explains, by kind, and the first message of each kind.
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    _application: str = field(default_factory=lambda: f"moored soak {secrets.token_hex(4)}")
    #: The backends of checkouts, and those that were ended.
    _seen: set[int] = field(default_factory=set)
    _killed: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def run(self, url: str) -> None:
        """Fill a pool, and let the callers use it until the time has passed."""
        options = {"application_name": self._application, "autocommit": True}
        pool = AsyncConnectionPool[Any](url, config=self.config, kwargs=options, open=False)
        queue, tasks = 2 * HOLD * self.callers / self.config.max_size, Tasks()
        async with pool:
            await pool.wait(FILL + 2 * self.config.stagger)
            try:
                tasks.start(self._sample(pool, monotonic()))
                if self.kill:
                    tasks.start(self._kill_now_and_then(pool, url))
                end = monotonic() + self.seconds
                work = [tasks.start(self._call(pool, end)) for _ in range(self.callers)]
                _, waiting = await asyncio.wait(work, timeout=self.seconds + GRACE + queue)
                for _ in waiting:
                    self.failed(TimeoutError("still waiting at the end"))
            finally:
                await tasks.cancel()

    def failed(self, error: Exception) -> None:
        """Count an error that no kill explains."""
        self.errors[type(error).__name__] += 1
        self.messages.setdefault(type(error).__name__, describe(error))

    async def _call(self, pool: AsyncConnectionPool[Any], end: float) -> None:
        while (since := monotonic()) < end:
            pid = 0
            try:
                async with pool.connection() as conn:
                    self.waits.append(monotonic() - since)
                    self._seen.add(pid := conn.info.backend_pid)
                    await conn.execute("SELECT 1")
                    await asyncio.sleep(HOLD)
                    await conn.execute("SELECT 1")
            except Exception as error:
                if pid in self._killed:
                    self._killed[pid]["errors"] += 1
                else:
                    self.failed(error)
                await asyncio.sleep(PAUSE)
            await asyncio.sleep(self.pause)

    async def _sample(self, pool: AsyncConnectionPool[Any], began: float) -> None:
        while True:
            now, elapsed = pool.statistics(), monotonic() - began
            self.samples.append(Sample(elapsed, now.size, now.empty, len(self.waits), now.refills))
            await asyncio.sleep(1 / SAMPLES)

    async def _kill_now_and_then(self, pool: AsyncConnectionPool[Any], url: str) -> None:
        """End a quarter of the pool's backends, and wait until the pool has replaced them."""
        ours = b"FROM pg_stat_activity WHERE application_name = %s AND pid = ANY(%s)"
        some = b"SELECT pid " + ours + b" ORDER BY random() LIMIT %s"
        most = -(-self.config.max_size // 4)
        while True:
            await asyncio.sleep(min(KILL_EVERY, self.seconds / 4))
            before, since = sum(pool.statistics().discards.values()), monotonic()
            try:
                async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                    found = await conn.execute(some, (self._application, list(self._seen), most))
                    pids = [pid for (pid,) in await found.fetchall()]
                    kill: dict[str, Any] = {"backends": len(pids), "errors": 0, "full_after": None}
                    self._killed |= dict.fromkeys(pids, kill)
                    end = b"SELECT pg_terminate_backend(pid) " + ours
                    await conn.execute(end, (self._application, pids))
            except psycopg.Error:
                continue  # the server is down: the callers report it
            self.kills.append(kill)
            while kill["full_after"] is None:
                await asyncio.sleep(0.02)
                now = pool.statistics()
                replaced = sum(now.discards.values()) - before >= len(pids)
                if replaced and now.size + now.in_use >= now.target:
                    kill["full_after"] = monotonic() - since

    def progress(self) -> str:
        """Describe the last second in one line."""
        if not self.samples:
            return f"{self.name}: filling the pool"
        before, now = self.samples[-1 - SAMPLES :][0], self.samples[-1]
        return (
            f"{self.name}: {now.elapsed:.0f} of {self.seconds:.0f} s, "
            f"{now.checkouts - before.checkouts} checkouts/s, {now.ready} ready, "
            f"{now.empty} found none, {self.errors.total()} errors, {len(self.kills)} kills"
        )

    def plain(self) -> dict[str, Any]:
        """Return what was measured as plain data."""
        samples = self.samples or [Sample(0.0)]
        first, end = samples[0], samples[-1]
        waits, ready = sorted(self.waits) or [0.0], [each.ready for each in samples]
        longest = (1000 * waits[of_100 * (len(waits) - 1) // 100] for of_100 in (50, 99, 100))
        seconds = list(pairwise([*samples[::SAMPLES], end]))
        connects = [until.connects - since.connects for since, until in seconds]
        return {
            "line": self.name,
            "seconds": round(end.elapsed, 1),
            "longest_lifetime": round(self.config.base_lifetime + self.config.lifetime_jitter, 1),
            "callers": self.callers,
            "ready_min": min(ready),
            "ready_median": round(median(ready)),
            "empty": end.empty,
            "checkouts_per_second": round(end.checkouts / (end.elapsed or 1.0)),
            **{f"wait_{name}_ms": round(next(longest), 2) for name in ("p50", "p99", "max")},
            "connects": end.connects - first.connects,
            "connects_in_worst_second": max(connects, default=0),
            "errors": self.errors,
            "messages": self.messages,
            "kills": self.kills,
            "each_second": {
                "checkouts": [until.checkouts - since.checkouts for since, until in seconds],
                "ready": [until.ready for _, until in seconds],
                "connects": connects,
            },
        }


def three_lines(config: ReservoirConfig, callers: int, seconds: float, kill: bool) -> list[Line]:
    """Return steady load, more callers than connections, and the expiry of all connections.

    In the last one, connections live for at most half of its time, unless that needs more than half
    of the rate. It has no kills, so that its errors are those of expiry.
    """
    few = max(1, config.max_size // 2)
    longest = config.base_lifetime + config.lifetime_jitter
    needed = 2 * config.max_size / config.rate / config.usable_lifetime
    factor = min(1.0, max(seconds / 2 / longest, needed))
    lives = ("base_lifetime", "lifetime_jitter", "guard_window")
    expiring = config.but(**{name: factor * getattr(config, name) for name in lives})
    return [
        Line(name="steady", config=config, callers=few, seconds=seconds, kill=kill),
        Line(name="burst", config=config, callers=callers, seconds=seconds, pause=0.0, kill=kill),
        Line(name="expiry", config=expiring, callers=few, seconds=seconds),
    ]
