"""Does an outbox miss events when connections die, and what does publishing and reading cost?"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from _harness import Figure, Report, main, paired, spread
from moored.embedded import SyncEmbeddedPostgres
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
        ("publish_vs_insert", "notify", 1),
        ("publish_vs_insert_8_writers", "notify", WRITERS),
        ("publish_for_stream_vs_insert_8_writers", "stream", WRITERS),
        ("publish_for_poll_vs_insert_8_writers", "poll", WRITERS),
    )
    for name, wake, writers in sides:
        install(url, wake)

        def ours(writers: int = writers) -> float:
            return write_rate(url, PUBLISH, writers)

        def plain(writers: int = writers) -> float:
            return write_rate(url, INSERT, writers)

        report.add(name, paired(ours, plain, rounds))
    install(url)
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


def measure(report: Report, quick: bool) -> None:
    with SyncEmbeddedPostgres() as server:
        gap(report, server.url, 1_000 if quick else 10_000, 5 if quick else 20)
        publish(report, server.url, 3 if quick else 9)
        read(report, server.url, 5_000 if quick else 50_000, 3)
    report.notes.append(
        f"{WRITERS} writers, transactions open for 0 to 30 ms; missed and duplicates are of two "
        "consumers together; an INSERT is a commit of its own, through one connection per writer"
    )


if __name__ == "__main__":
    main("outbox", __doc__ or "", measure)
