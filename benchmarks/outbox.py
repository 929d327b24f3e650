"""Does an outbox miss events when connections die, and what does publishing and reading cost?

`stream_vs_notify_…` compares the two ways to wake consumers (`ring_…`: without a table), where each
flush of the WAL takes 2 ms, as on a disk or with a synchronous standby: events per second that are
published, each in a transaction of its own, and consumed. NOTIFY holds a lock of the whole server
during the flush, so that commits follow one after the other; without it, they share a flush.
`wake_ms_p50_…` is the time from before `publish()` to the consumer, with one publisher; `standby`
is a replica without the stream, which the one that has it wakes.

`open_elsewhere_p99_vs_none` is the 99th percentile of that time at 200 events per second, while a
writing transaction is open in another database, divided by that without one; for
`open_unpublished_p99_vs_none`, the transaction is in the same database, and has not published.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import psycopg

from _harness import Figure, Report, main, paired, quartiles, spread
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Listener, OutboxEvent, Postgres
from moored.postgres.outbox import Outbox, Wake, ddl

# The tests are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.outbox.gap import WRITERS, gap_run

PAYLOAD = '{"order": 4711, "state": "paid", "text": "' + "x" * 200 + '"}'
#: Inserts of one writer in one round.
INSERTS = 300
INSERT = "insert into plain (channel, payload) values ('orders', %s)"
PUBLISH = "select moored.outbox_publish('orders', %s)"


def install(url: str, wake: Wake = "notify") -> None:
    """Create an empty outbox, and a plain table to compare it with."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("drop schema if exists moored cascade; drop table if exists plain")
        conn.execute(ddl(wake=wake).encode())
        conn.execute(
            "create table plain (id bigint generated always as identity primary key, "
            "tenant text, channel text not null, payload text not null, "
            "at timestamptz not null default clock_timestamp())"
        )


def write_rate(url: str, statement: str, writers: int) -> float:
    """Return the commits per second of some writers, each with one statement."""

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            for _ in range(INSERTS):
                await conn.execute(statement.encode(), [PAYLOAD])

    async def run() -> float:
        begin = time.perf_counter()
        await asyncio.gather(*(write() for _ in range(writers)))
        return writers * INSERTS / (time.perf_counter() - begin)

    return asyncio.run(run())


def read_rate(url: str, events: int, *, consume: bool) -> float:
    """Return the events per second of a consumer that acknowledges, or of a reader."""

    async def run() -> float:
        async with Outbox(url, retain=None) as outbox:
            begin = time.perf_counter()
            count, cursor = 0, None
            while not consume and count < events:
                batch = await outbox.read(cursor)
                count, cursor = count + len(batch.events), batch.cursor
            if consume:
                await outbox.drop_consumer("bench")
                async with outbox.consume("bench") as consumer:
                    while count < events:
                        event = await anext(consumer)
                        await event.ack()  # type: ignore[union-attr]
                        count += 1
            return events / (time.perf_counter() - begin)

    return asyncio.run(run())


def gap(report: Report, url: str, events: int, kills: int) -> None:
    """Run 8 writers while listening connections are killed, and count what each reader missed."""
    install(url)
    found = asyncio.run(gap_run(url, events, kills, seed=1))
    total = len(found.published)
    if total < events or found.kills < kills:
        raise AssertionError("the run was not complete")
    for name in ("missed", "duplicates", "bare_missed", "id_cursor_missed"):
        report.add(name, Figure(getattr(found, name), f"of {total:,}"))


def publish(report: Report, url: str, rounds: int) -> None:
    """Compare publishing with an INSERT into a plain table."""
    sides: tuple[tuple[str, Wake, int], ...] = (
        ("publish_vs_insert", "stream", 1),
        ("publish_vs_insert_8_writers", "stream", WRITERS),
        ("publish_for_notify_vs_insert_8_writers", "notify", WRITERS),
        ("publish_for_poll_vs_insert_8_writers", "poll", WRITERS),
    )
    for name, wake, writers in sides:
        install(url, wake)

        def ours(writers: int = writers) -> float:
            return write_rate(url, PUBLISH, writers)

        def plain(writers: int = writers) -> float:
            return write_rate(url, INSERT, writers)

        report.add(name, paired(ours, plain, rounds))
    install(url, "stream")
    rates = [write_rate(url, PUBLISH, WRITERS) for _ in range(rounds)]
    report.add("published_per_s_8_writers", spread(rates, "/s"))


def read(report: Report, url: str, events: int, rounds: int) -> None:
    """Measure how fast stored events are read."""
    install(url)
    with psycopg.connect(url) as conn:
        conn.execute(
            "insert into moored.outbox (channel, payload) select 'orders', %s "
            f"from generate_series(1, {events})".encode(),
            [PAYLOAD],
        )
    sides: dict[str, Callable[[], float]] = {
        "read_per_s": lambda: read_rate(url, events, consume=False),
        "consumed_per_s": lambda: read_rate(url, events, consume=True),
    }
    for name, side in sides.items():
        report.add(name, spread([side() for _ in range(rounds)], "/s"))


# -- two ways to wake consumers ------------------------------------------------------------------

#: A flush takes at least 2 ms, whatever the disk, and commits that wait meanwhile share the next.
SLOW_FLUSH = {"fsync": "on", "commit_delay": "2000", "commit_siblings": "0"}
LIMIT = 180.0


#: How consumers learn of an event: `wake`; in a replica without the stream; without a table.
Side = Literal["notify", "stream", "standby", "ring"]


@asynccontextmanager
async def woken(url: str, side: Side) -> AsyncIterator[tuple[Outbox, AsyncIterator[str]]]:
    """An outbox, and the payloads that its consumer gets."""
    install(url, "notify" if side == "notify" else "stream")
    async with AsyncExitStack() as stack:
        if side == "notify":
            listener = await stack.enter_async_context(Listener(url))
            outbox = Outbox(url, listener=listener)
        else:
            state_dir = stack.enter_context(tempfile.TemporaryDirectory())
            pg = Postgres(url, messages=side == "ring", state_dir=state_dir, pool_size=4)
            await pg.open()
            stack.push_async_callback(pg.drop)
            await pg.wait_until_active(LIMIT)
            if side == "standby":
                pg = Postgres(url, state_dir=f"{state_dir}/standby", pool_size=4)
                await stack.enter_async_context(pg)
            outbox = Outbox(pg, table=side != "ring")
        await stack.enter_async_context(outbox)
        payloads = await stack.enter_async_context(aclosing(consumed(outbox)))
        async with asyncio.timeout(LIMIT):
            await anext(payloads)
            while not outbox.wakes.up:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.01)
            yield outbox, payloads


async def consumed(outbox: Outbox) -> AsyncGenerator[str, None]:
    """Yield the payloads of all events from now on, after an empty one."""
    if not outbox.table:
        async for batch in outbox.tail():
            for payload in [event.payload for event in batch.events] or [""]:
                yield payload
        return
    async with outbox.consume("bench") as consumer:
        yield ""
        async for event in consumer:
            assert isinstance(event, OutboxEvent)
            yield event.payload
            await event.ack()


def woken_rate(url: str, side: Side, writers: int, each: int) -> float:
    """Return the events per second that writers publish, one at a time, and a consumer gets."""

    async def write(name: int, outbox: Outbox) -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            for number in range(each):
                await outbox.publish(conn, "orders", f"{name}/{number}")

    async def take(payloads: AsyncIterator[str]) -> list[str]:
        return [await anext(payloads) for _ in range(writers * each)]

    async def run() -> float:
        async with woken(url, side) as (outbox, payloads):
            begin = time.perf_counter()
            taking = asyncio.create_task(take(payloads))
            await asyncio.gather(*(write(name, outbox) for name in range(writers)))
            found = await taking
            seconds = time.perf_counter() - begin
        if sorted(found) != sorted(f"{a}/{b}" for a in range(writers) for b in range(each)):
            raise AssertionError("events are missing, or came twice")
        return len(found) / seconds

    return asyncio.run(run())


def wake_latency(url: str, side: Side, number: int) -> Figure:
    """Return the milliseconds from before `publish()` until the consumer has the event."""

    async def run() -> list[float]:
        found = []
        async with (
            woken(url, side) as (outbox, payloads),
            await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
        ):
            for n in range(number):
                waiting = asyncio.ensure_future(anext(payloads))
                await asyncio.sleep(0.005)  # it waits for a wake-up
                begin = time.perf_counter()
                await outbox.publish(conn, "orders", str(n))
                assert await waiting == str(n)
                found.append((time.perf_counter() - begin) * 1000)
        return found

    return quartiles(asyncio.run(run()), "ms")


def wakes(report: Report, quick: bool) -> None:
    """Compare NOTIFY and the change stream as the wake-up, and the stream without a table."""
    with SyncEmbeddedPostgres(options=SLOW_FLUSH) as server:
        sides: tuple[tuple[Side, int, int], ...] = (
            ("stream", 1, 40),
            ("stream", 8, 20),
            ("stream", 32, 15),
            ("ring", 32, 15),
        )
        for side, writers, each in sides:
            ours = partial(woken_rate, server.url, side, writers, each)
            notify = partial(woken_rate, server.url, "notify", writers, each)
            figure = paired(ours, notify, 2 if quick else 7)
            report.add(f"{side}_vs_notify_{writers}_writers", figure)
    with SyncEmbeddedPostgres() as server:
        for side in get_args(Side):
            report.add(f"wake_ms_p50_{side}", wake_latency(server.url, side, 50 if quick else 500))


# -- transactions that have not published ---------------------------------------------------------

#: Events per second, and of one phase.
RATE, PHASE = 200, 200
#: Where a transaction is open that has written, and has not published.
Where = Literal["none", "elsewhere", "unpublished"]


@asynccontextmanager
async def writing(url: str, elsewhere: str, where: Where) -> AsyncIterator[None]:
    """Keep a transaction open."""
    async with AsyncExitStack() as stack:
        if where != "none":
            place = url if where == "unpublished" else elsewhere
            conn = await stack.enter_async_context(await psycopg.AsyncConnection.connect(place))
            await conn.execute("create table written (n int); insert into written values (1)")
        yield
        if where != "none":
            await conn.rollback()


async def phase(outbox: Outbox, url: str, payloads: AsyncIterator[str]) -> list[float]:
    """Publish at a steady rate; return the seconds from before each event to the consumer."""
    sent: list[float] = []

    async def publish() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            begin = time.perf_counter()
            for number in range(PHASE):
                await asyncio.sleep(max(0.0, begin + number / RATE - time.perf_counter()))
                sent.append(time.perf_counter())
                await outbox.publish(conn, "orders", str(number))

    publishing, found = asyncio.create_task(publish()), []
    async with asyncio.timeout(LIMIT):
        for number in range(PHASE):
            if await anext(payloads) != str(number):
                raise AssertionError("an event is missing, or came twice")
            found.append(time.perf_counter() - sent[number])
        await publishing
    return found


def open_transactions(report: Report, rounds: int) -> None:
    """Compare the latency with and without open transactions, one after the other."""

    async def run(url: str, elsewhere: str) -> dict[Where, list[float]]:
        found: dict[Where, list[float]] = {where: [] for where in get_args(Where)}
        async with woken(url, "stream") as (outbox, payloads):
            await phase(outbox, url, payloads)  # the first time, connections are opened
            for _ in range(rounds):
                for where, times in found.items():
                    async with writing(url, elsewhere, where):
                        times += await phase(outbox, url, payloads)
        return found

    with SyncEmbeddedPostgres() as server:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("create database elsewhere")
        found = asyncio.run(run(server.url, server.url_of("elsewhere")))
    p99 = {where: statistics.quantiles(times, n=100)[98] for where, times in found.items()}
    for where, value in p99.items():
        report.add(f"open_{where}_ms_p99", Figure(value * 1000, "ms"))
    for where in ("elsewhere", "unpublished"):
        report.add(f"open_{where}_p99_vs_none", Figure(p99[where] / p99["none"], "times"))


def measure(report: Report, quick: bool) -> None:
    open_transactions(report, 5 if quick else 25)
    wakes(report, quick)
    with SyncEmbeddedPostgres() as server:
        gap(report, server.url, 500 if quick else 10_000, 3 if quick else 20)
        publish(report, server.url, 2 if quick else 9)
        read(report, server.url, 5_000 if quick else 50_000, 3)
    report.notes.append(
        f"{WRITERS} writers, transactions open for 0 to 30 ms; missed and duplicates are of two "
        "consumers together; an INSERT is a commit of its own, through one connection per writer"
    )


if __name__ == "__main__":
    main("outbox", (__doc__ or "").splitlines()[0], measure)
