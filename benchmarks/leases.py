"""How long does an acquire take in each store, and how much of a shared rate limit is used?"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis.asyncio import Redis

from _harness import Figure, Report, main, paired
from moored.embedded import SyncEmbeddedPostgres
from moored.leases import Leases, connect

# The tests and tools are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.leases.dynamodb.servers import Ministack
from tests.leases.fleet import Fleet
from tests.leases.observer import SECOND, excess, grants
from tests.leases.redis_server import RedisServer
from tests.leases.trials import takers
from tools import servers

PROCESSES = 4
RATE = 100.0
BURST = 100
ACQUIRES = 50
LIMIT = 100
LOCKS = 500
REAL = ("grant_efficiency_redis", "grant_efficiency_postgres")
#: Seconds before the measurement, in which the processes use up the initial burst.
SETTLE = 2.0


async def acquire_times(leases: Leases, count: int) -> list[float]:
    """Return the milliseconds of each acquire; check each lease, and release all."""
    held, times = [], []
    for _ in range(count):
        begin = time.perf_counter()
        lease = await leases.acquire("db/orders", limit=LIMIT, ttl=60.0)
        times.append((time.perf_counter() - begin) * 1000)
        if lease is None or lease.local:
            raise AssertionError("the store did not grant a lease")
        held.append(lease)
    if len(await leases.held("db/orders")) != count:
        raise AssertionError("the store does not list the granted leases")
    for lease in held:
        await lease.release()
    return times


def acquire_ms(url: str, rounds: int) -> Figure:
    """Return the median over all acquires, with the lowest and highest median of a round."""

    async def run() -> list[list[float]]:
        async with connect(url, on_unavailable="refuse") as leases:
            await acquire_times(leases, 20)
            return [await acquire_times(leases, ACQUIRES) for _ in range(rounds)]

    found = asyncio.run(run())
    medians = [statistics.median(each) for each in found]
    whole = statistics.median(each for times in found for each in times)
    return Figure(whole, "ms", min(medians), max(medians))


def lease_speed(url: str) -> float:
    """Return our exclusive leases per second, acquired and released."""

    async def run() -> float:
        async with connect(url, on_unavailable="refuse") as leases:
            begin = time.perf_counter()
            for number in range(LOCKS):
                lease = await leases.acquire(f"job/{number}", limit=1, ttl=60.0)
                if lease is None:
                    raise AssertionError("an exclusive lease of an unused key was refused")
                await lease.release()
            return LOCKS / (time.perf_counter() - begin)

    return asyncio.run(run())


def lock_speed(url: str) -> float:
    """Return the peer's locks per second: of redis-py, without fences, limits or renewals."""

    async def run() -> float:
        async with Redis.from_url(url) as client:
            begin = time.perf_counter()
            for number in range(LOCKS):
                lock = client.lock(f"lock/{number}", timeout=60.0)
                if not await lock.acquire(blocking=False):
                    raise AssertionError("an exclusive lease of an unused key was refused")
                await lock.release()
            return LOCKS / (time.perf_counter() - begin)

    return asyncio.run(run())


def grant_efficiency(url: str, seconds: float) -> Figure:
    """Return the share of rate x time that four processes use together; check every window."""
    with tempfile.TemporaryDirectory() as directory, Fleet(url, Path(directory)) as fleet:
        takers(fleet, RATE, BURST, processes=PROCESSES)
        time.sleep(SETTLE)
        begin = time.monotonic_ns()
        time.sleep(seconds)
        end = time.monotonic_ns()
        fleet.kill_all()
        used = grants(fleet.events())
    if (over := excess(used, rate=RATE, burst=BURST)) is not None:
        raise AssertionError(f"more than the limit: {over}")
    slices = [(begin + n * SECOND, begin + (n + 1) * SECOND) for n in range(int(seconds))]
    parts = [sum(n for at, n in used if a <= at < b) / RATE for a, b in slices]
    whole = sum(n for at, n in used if begin <= at < end)
    return Figure(whole / (RATE * (end - begin) / SECOND), "", min(parts), max(parts))


@contextmanager
def stores(report: Report) -> Iterator[dict[str, str]]:
    """Start the installed stores, and yield their URLs."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        urls = {"memory": "memory://"}
        if (binary := servers.find("redis")) is None:
            report.notes.append("redis-server is not installed, so Redis was not measured")
        else:
            urls["redis"] = stack.enter_context(RedisServer(binary)).url
        server = SyncEmbeddedPostgres(Path(directory) / "postgres")
        urls["postgres"] = stack.enter_context(server).url
        urls["dynamodb"] = stack.enter_context(Ministack()).url("leases")
        yield urls


def measure(report: Report, quick: bool) -> None:
    with stores(report) as urls:
        for name, url in urls.items():
            report.add(f"acquire_ms_p50_{name}", acquire_ms(url, 5 if quick else 20))
        if "redis" in urls:
            ratio = paired(
                lambda: lease_speed(urls["redis"]),
                lambda: lock_speed(urls["redis"]),
                5 if quick else 15,
            )
            report.add("lease_vs_redis_lock", ratio)
        seconds = 4.0 if quick else 20.0
        for name in ("redis", "postgres", "dynamodb"):
            if name in urls:
                figure = grant_efficiency(urls[name], seconds)
                report.add(f"grant_efficiency_{name}", figure)
    # DynamoDB is excluded: an emulator in Python is itself the bottleneck.
    real = [f.value for n, f in report.figures.items() if n in REAL]
    report.add("grant_efficiency", Figure(min(real), "", min(real), max(real)))
    report.notes.append(
        f"leases of one key with a limit of {LIMIT:,}, one after the other; "
        f"{PROCESSES} processes at {RATE:g}/s with a burst of {BURST}, no window over the limit; "
        "grant_efficiency is the lower of Redis and Postgres; DynamoDB is an emulator in Python"
    )


if __name__ == "__main__":
    main("leases", __doc__ or "", measure)
