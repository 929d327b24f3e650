"""How soon does a listener notice a dead connection, recover, and pass a notification on?

The black hole is a link between two network namespaces that is cut: no packet of either side
arrives, and nothing answers keepalives. It is detected with an idle connection, and with a
statement in flight. The recovery is from a long outage, after at least one series of attempts has
failed: the next series begins after 8 s plus up to 4 s of jitter.

A notification is timed from before NOTIFY to the handler, beside psycopg's `notifies()` and
asyncpg's `add_listener()` in turns, with the same sender.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg

from _harness import Report, main, quartiles, spread
from moored.embedded import EmbeddedPostgres
from moored.postgres import Listener, Notification

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.listener.breaks import black_hole

LIMIT = 60.0
CHANNEL = "bench"

Wait = Callable[[], Any]


# -- a notification -----------------------------------------------------------------------------


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[Wait]:
    async with Listener(url) as listener, listener.subscribe(CHANNEL) as events:

        async def wait() -> str:
            event = await anext(events)
            assert isinstance(event, Notification)
            return event.payload

        yield wait


@asynccontextmanager
async def bare_psycopg(url: str) -> AsyncIterator[Wait]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute(f"listen {CHANNEL}".encode())
        generator = conn.notifies()

        async def wait() -> str:
            return (await anext(generator)).payload

        yield wait
        await generator.aclose()


@asynccontextmanager
async def bare_asyncpg(url: str) -> AsyncIterator[Wait]:
    conn = await asyncpg.connect(url)
    arrived: asyncio.Queue[str] = asyncio.Queue()
    await conn.add_listener(CHANNEL, lambda *event: arrived.put_nowait(event[-1]))
    yield arrived.get
    await conn.close()


async def latencies(url: str, number: int) -> dict[str, list[float]]:
    """Return the milliseconds of each notification, for each side; the sides take turns."""
    found: dict[str, list[float]] = {}
    sides = {"": ours, "_psycopg": bare_psycopg, "_asyncpg": bare_asyncpg}
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as sender:
        for _ in range(5):
            for name, side in sides.items():
                async with side(url) as wait, asyncio.timeout(LIMIT):
                    for n in range(number // 5):
                        waiting = asyncio.ensure_future(wait())
                        await asyncio.sleep(0)
                        begin = time.perf_counter()
                        await sender.execute(b"select pg_notify(%s, %s)", (CHANNEL, str(n)))
                        assert await waiting == str(n)
                        found.setdefault(name, []).append((time.perf_counter() - begin) * 1000)
    return found


# -- outages ------------------------------------------------------------------------------------


async def down(listener: Listener, begin: float) -> float:
    """Return the milliseconds until the listener has noticed the loss."""
    await listener.monitor.wait_until(lambda _: not listener.up, LIMIT)
    return (time.perf_counter() - begin) * 1000


async def idle_blackhole(url: str, phase: float) -> float:
    """Cut an idle connection, at some time after its heartbeat: return the time to notice it."""
    async with black_hole(url) as hole, Listener(hole.url) as listener:
        await asyncio.sleep(phase)
        hole.cut()
        return await down(listener, time.perf_counter())


async def long_outage(server: EmbeddedPostgres, seconds: float) -> float:
    """Kill the server; return the time from when it accepts connections again to `up`."""
    failed = asyncio.Event()
    async with Listener(server.url) as listener:
        listener.machine.observe(lambda move: failed.set() if move.target.step == "pause" else None)
        await server.kill()
        await asyncio.sleep(seconds)
        await asyncio.wait_for(failed.wait(), LIMIT)
        await server.start()
        begin = time.perf_counter()
        await listener.wait_until_up(LIMIT)
        return (time.perf_counter() - begin) * 1000


async def inflight_blackhole(url: str) -> float:
    """Cut a connection, and send a statement: return the time to notice it."""
    async with black_hole(url) as hole, Listener(hole.url) as listener:
        hole.cut()
        begin = time.perf_counter()
        async with listener.subscribe("new"):
            return await down(listener, begin)


async def idle_statements(seconds: float) -> tuple[float, float]:
    """Return the statements per minute of an idle listener: direct, and through the pool."""
    options = {"log_statement": "all", "log_line_prefix": "<%a> "}
    async with EmbeddedPostgres(options=options) as server:
        log = server.data_dir / "postgres.log"
        pooled = f"{server.url}?application_name=pooled"
        async with Listener(server.url, notify_through=pooled):
            await asyncio.sleep(1.0)
            before = log.read_text(errors="replace")
            await asyncio.sleep(seconds)
            lines = log.read_text(errors="replace")[len(before) :].splitlines()
    counts = [
        sum(f"<{name}>" in line and "statement:" in line for line in lines)
        for name in ("moored listener", "pooled")
    ]
    return counts[0] * 60 / seconds, counts[1] * 60 / seconds


async def measure_all(report: Report, quick: bool) -> None:
    async with EmbeddedPostgres() as server, EmbeddedPostgres() as broken:
        url = server.url
        for name, values in (await latencies(url, 200 if quick else 2000)).items():
            report.add(f"notify_ms_p50{name}", quartiles(values, "ms"))
        rounds = 1 if quick else 5
        # They only wait, so they run at the same time.
        inflight, idle, back, (direct, pooled) = await asyncio.gather(
            repeated(rounds, lambda n: inflight_blackhole(url)),
            repeated(rounds, lambda n: idle_blackhole(url, 0.5 + n)),
            repeated(rounds, lambda n: long_outage(broken, 0.0 if quick else 60.0)),
            idle_statements(10.0 if quick else 60.0),
        )
        report.add("detect_ms_inflight_blackhole", spread(inflight, "ms"))
        report.add("detect_ms_idle_blackhole", spread(idle, "ms"))
        report.add("recover_ms_after_return", spread(back, "ms"))
    report.add("idle_statements_per_minute", spread([direct], ""))
    report.add("idle_canaries_per_minute", spread([pooled], ""))


async def repeated(rounds: int, work: Callable[[int], Coroutine[Any, Any, float]]) -> list[float]:
    """Do the work once in each round."""
    return [await work(number) for number in range(rounds)]


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.ERROR)  # the errors of the outages are expected
    asyncio.run(measure_all(report, quick))
    report.notes.append("latencies with their quartiles, outages with their minimum and maximum")


if __name__ == "__main__":
    main("listener", (__doc__ or "").splitlines()[0], measure)
