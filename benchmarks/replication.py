"""How fast does a consumer receive changes, and how much memory does that take?

An embedded PostgreSQL has transactions of 1, 100 or 10,000 rows in its WAL; every side reads all of
them, in turns and over several rounds, each time from a new slot. The rows are of one table::

    payments (id bigint primary key, account int, amount numeric(12, 2), note text, at timestamptz)

sent as text, with the same options of pgoutput for all sides. The sides:

- consumer: our public interface, `async for txn in pg.changes(…)`: every row is decoded to column
  values and every transaction acknowledged; the number of rows and a checksum over every column
  must equal those of the table;
- stream: the same without decoding the rows;
- pg_recvlogical: PostgreSQL's own client, writing to /dev/null;
- psycopg2_raw, psycopg2_decoded: its replication cursor, counting rows, or splitting each into a
  dict of strings; psycopg3_raw: libpq through psycopg 3, message by message. None converts values;
- peek: the decoding inside the server, without a stream: the upper bound.

A figure against another side is the median of the ratios of all rounds. The time to connect is not
counted. Server and reader share the machine: with fewer than two idle cores a reader that computes
is slowed down more than one that waits.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg

from _harness import Figure, Report, main, ratios, spread
from _replication_big import big_txn_rss
from _replication_data import PUBLICATION, Log, prepare, written
from _replication_sides import (
    Recvlogical,
    consumer,
    peek,
    psycopg2_decoded,
    psycopg2_raw,
    psycopg3_raw,
    stream,
)
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Postgres, Transaction

#: Rows per transaction, and the transactions of a quick run and of a long one.
CASES = {1: (30_000, 100_000), 100: (2_000, 6_000), 10_000: (20, 60)}
#: The rows of the big transaction.
BIG = (300_000, 5_000_000)
COMMITS = (50, 300)
ROUNDS = (3, 5)
SERVER = {
    "wal_level": "logical",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}

Side = Callable[[Log], float]


def rounds(sides: Mapping[str, Side], log: Log, number: int) -> dict[str, list[float]]:
    """Return the rows per second of each side in each round, after one round to warm up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, number):
        order = list(sides) if turn % 2 else list(sides)[::-1]
        for name in order:
            speed = log.rows / sides[name](log)
            if turn >= 0:
                found[name].append(speed)
    return found


def ratio(found: dict[str, list[float]], one: str, other: str) -> Figure:
    """Return how many times faster one side is than the other."""
    return spread(ratios(found[one], found[other]), "times")


def measure_speed(report: Report, url: str, bin_dir: Path, quick: bool) -> None:
    """Measure all sides, for each size of transactions."""
    for size, counts in CASES.items():
        sides: dict[str, Side] = {"consumer": consumer, "pg_recvlogical": Recvlogical(bin_dir)}
        if size == 100:
            sides["stream"] = stream
        sides |= {
            "psycopg2_raw": psycopg2_raw,
            "psycopg2_decoded": psycopg2_decoded,
            "psycopg3_raw": psycopg3_raw,
            "peek": peek,
        }
        with written(url, counts[not quick], size) as log:
            found = rounds(sides, log, ROUNDS[not quick])
        report.add(f"consumer_vs_pg_recvlogical_{size}", ratio(found, "consumer", "pg_recvlogical"))
        if size == 100:
            report.add("stream_vs_pg_recvlogical_100", ratio(found, "stream", "pg_recvlogical"))
        report.add(f"consumer_vs_peek_{size}", ratio(found, "consumer", "peek"))
        for name, speeds in found.items():
            report.add(f"{name}_{size}_rows_per_s", spread(speeds, "/s"))


async def latencies(url: str, state: str, number: int) -> list[float]:
    """Return the milliseconds from each commit, by the server's clock, to the consumer."""
    found: list[float] = []
    postgres = Postgres(
        url, pool_size=2, state_dir=state, publication=PUBLICATION, manual_publication=True
    )
    async with (
        postgres as pg,
        pg.changes("latency") as changes,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
    ):
        await pg.wait_until_active(60.0)
        for turn in range(-5, number):
            await asyncio.sleep(0.02)
            await conn.execute("insert into marks values (%s)", [1000 + turn])
            txn = await anext(changes)
            now = time.time()
            assert isinstance(txn, Transaction)
            await txn.ack()
            if [change.new for change in txn] != [{"id": 1000 + turn}]:
                raise AssertionError(f"{txn} is not the transaction just written")
            if turn >= 0:
                found.append((now - txn.commit_time.timestamp()) * 1000)
    return found


def measure_latency(report: Report, url: str, number: int) -> None:
    """Measure the latency of single commits on an otherwise idle database."""
    with tempfile.TemporaryDirectory() as state:
        found = asyncio.run(latencies(url, state, number))
    cuts = statistics.quantiles(found, n=100)
    report.add("latency_ms_p50", Figure(cuts[49], "ms", cuts[24], cuts[74]))
    report.add("latency_ms_p99", Figure(cuts[98], "ms"))


def measure_memory(report: Report, url: str, rows: int) -> None:
    """Measure the memory for one very large transaction."""
    with written(url, 1, rows, summed=False) as log:
        report.add("big_txn_rss_mb", Figure(big_txn_rss(log), "MB"))


def measure(report: Report, quick: bool) -> None:
    """Measure all figures."""
    with SyncEmbeddedPostgres(options=SERVER) as server:
        assert server.bin_dir is not None
        prepare(server.url)
        measure_latency(report, server.url, COMMITS[not quick])
        measure_speed(report, server.url, server.bin_dir, quick)
        measure_memory(report, server.url, BIG[not quick])
    sizes = ", ".join(f"{counts[not quick]:,} of {size:,}" for size, counts in CASES.items())
    report.notes.append(
        f"transactions and rows in each: {sizes}; {ROUNDS[not quick]} rounds; in brackets the "
        f"minimum and the maximum; the big transaction has {BIG[not quick]:,} rows; PostgreSQL "
        f"{server.version}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end"
    )


if __name__ == "__main__":
    main("replication", (__doc__ or "").splitlines()[0], measure)
