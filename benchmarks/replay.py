"""What does a reconnect of many clients of quiet tenants cost them, and the live events of others?

An outbox has a million events, and 200 quiet tenants have one event each after the position from
which their clients resume, at the beginning. `quiet_replay_ms_p95` is the time of one such client
alone, from its subscription to its event. `live_p99_reconnect_vs_calm` compares the time from
before `publish()` to the stream of a busy tenant, with and without 2,000 such clients, which come
within two seconds, as after a deploy (the server names them 1 to 3 s to wait).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import UUID

import psycopg

from _harness import Figure, Report, main, quartiles
from moored.broker import Broker, LiveEvent
from moored.broker.postgres import OutboxEvents
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Listener
from moored.postgres.outbox import Outbox, ddl

EVENTS, QUICK_EVENTS = 1_000_000, 300_000
TENANTS, CLIENTS = 200, 2_000
#: Seconds within which the clients reconnect, and for which live events are measured.
SPREAD, PHASE = 2.0, 4.0
#: Live events per second.
RATE = 60
BUSY = str(UUID(int=1))

FILL = """
insert into moored.outbox (tenant, channel, payload)
select case when n % %(each)s = 0
    then lpad(to_hex(1000 + n / %(each)s), 32, '0')::uuid::text else %(busy)s end, 'orders', '{}'
from generate_series(1, %(events)s) n
"""

INDEX = """
create index if not exists outbox_by_tenant on moored.outbox (tenant, id) where tenant is not null
"""


def tenant_of(number: int) -> str:
    """Return a quiet tenant."""
    return str(UUID(int=1001 + number))


async def fill(url: str, events: int) -> str:
    """Store the events, and return the position before all but the first."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute(ddl().encode())
        await conn.execute(
            "insert into moored.outbox (tenant, channel, payload) values (%s, 'orders', '{}')",
            [BUSY],
        )
        async with running(url) as (_, broker), broker.subscribe(BUSY) as stream:
            first = stream.start
        values = {"each": events // TENANTS, "busy": BUSY, "events": events}
        async with psycopg.AsyncClientCursor(conn) as cursor:
            await cursor.execute(FILL.replace("% %(", "%% %("), values)
        await conn.execute(INDEX)
        await conn.execute("vacuum analyze moored.outbox")
    return first


@asynccontextmanager
async def running(url: str) -> AsyncIterator[tuple[Outbox, Broker]]:
    """A broker of the outbox, as in a service."""
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(Listener(url))
        outbox = await stack.enter_async_context(Outbox(url, listener=listener, retain=None))
        yield outbox, await stack.enter_async_context(Broker(OutboxEvents(outbox)))


async def replay(broker: Broker, tenant: str, after: str) -> float:
    """Return the seconds that a client waits for the event that it missed."""
    begin = time.perf_counter()
    async with broker.subscribe(tenant, after=after) as stream:
        event = await anext(stream)
        if not isinstance(event, LiveEvent) or event.tenant != tenant:
            raise AssertionError(f"{event} instead of the event of {tenant}")
        return time.perf_counter() - begin


async def live(outbox: Outbox, broker: Broker, url: str) -> list[float]:
    """Return the seconds from before `publish()` to the stream of the busy tenant."""
    sent = asyncio.Queue[float]()
    found: list[float] = []

    async def publish() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            for number in range(count):
                sent.put_nowait(time.perf_counter())
                await outbox.publish(conn, "orders", {"number": number}, tenant=BUSY)
                await asyncio.sleep(max(0.0, begin + number / RATE - time.perf_counter()))

    begin, count = time.perf_counter(), int(PHASE * RATE)
    async with broker.subscribe(BUSY) as stream, asyncio.timeout(10 * PHASE):
        publishing = asyncio.create_task(publish())
        while len(found) < count:
            event = await anext(stream)
            if not isinstance(event, LiveEvent):
                raise AssertionError(f"{event} instead of a live event")
            found.append(time.perf_counter() - sent.get_nowait())
        await publishing
    return found


async def reconnect(broker: Broker, after: str) -> list[float]:
    """Let all clients come back within the spread, and return how long each waited."""

    begin, clients = time.perf_counter(), list[asyncio.Task[float]]()
    for number in range(CLIENTS):
        tenant = tenant_of(random.randrange(TENANTS))
        clients.append(asyncio.create_task(replay(broker, tenant, after)))
        await asyncio.sleep(max(0.0, begin + number * SPREAD / CLIENTS - time.perf_counter()))
    return await asyncio.gather(*clients)


def p99(values: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return statistics.quantiles(values, n=100)[98] * 1000


async def run(report: Report, url: str, events: int, rounds: int) -> None:
    """Measure one client alone, and all of them beside live events."""
    after = await fill(url, events)
    async with running(url) as (outbox, broker):
        alone = [await replay(broker, tenant_of(number), after) for number in range(TENANTS)]
        p95 = statistics.quantiles(alone, n=20)[18] * 1000
        report.add("quiet_replay_ms_p95", Figure(p95, "ms"))
        calm, busy, waited = list[float](), list[float](), list[float]()
        await reconnect(broker, after)  # the first time, connections are opened
        for _ in range(rounds):
            calm += await live(outbox, broker, url)
            measured, times = await asyncio.gather(
                live(outbox, broker, url), reconnect(broker, after)
            )
            busy += measured
            waited += times
    report.add("live_ms_p99_calm", Figure(p99(calm), "ms"))
    report.add("live_ms_p99_reconnect", Figure(p99(busy), "ms"))
    report.add("live_p99_reconnect_vs_calm", Figure(p99(busy) / p99(calm), "times"))
    report.add("reconnect_ms", quartiles([each * 1000 for each in waited], "ms"))
    report.notes.append(f"{events:,} events, {TENANTS} tenants, {CLIENTS:,} clients")


def measure(report: Report, quick: bool) -> None:
    """Run the benchmark."""
    with SyncEmbeddedPostgres() as server:
        events = QUICK_EVENTS if quick else EVENTS
        asyncio.run(run(report, server.url, events, 3 if quick else 5))


if __name__ == "__main__":
    main("replay", (__doc__ or "").partition("\n")[0], measure)
