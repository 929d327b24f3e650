"""What does an UPDATE of all rows cost a follower: stall of the loop, memory, CPU for each row?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from typing import Any

import psycopg

from _harness import Figure, Report, main, side_process
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Change, Follow, Postgres, Transaction

TABLE = "orders"
#: The rest of the row is not asked for. Half of the rows meet the condition after the update.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "columns": {"columns": ["id", "amount"]},
    "where": {"where": "amount % 2 = 0"},
}
UPDATE = """
import psycopg
with psycopg.connect({url!r}) as conn:
    conn.execute("update {table} set amount = id + 1")
"""
#: How often the loop is looked at, in seconds.
TICK = 0.005
# Kept open: to open it every time would cost as much as some rows.
_MEMORY = os.open("/proc/self/statm", os.O_RDONLY)


def fill(url: str, rows: int) -> None:
    """Create a table with rows of six columns."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"drop table if exists {TABLE}".encode())
        conn.execute(
            f"create table {TABLE} (id bigint primary key, amount int, price numeric(10, 2), "
            "state text, at timestamptz, note text)".encode()
        )
        conn.execute(
            f"insert into {TABLE} select n, n, (n % 9999) / 100.0, 'state ' || n % 7, now(), "
            f"'note ' || n from generate_series(1, {rows}) n".encode()
        )
        conn.execute(f"vacuum analyze {TABLE}".encode())


def resident() -> float:
    """Return the memory of this process, in MB."""
    return int(os.pread(_MEMORY, 100, 0).split()[1]) * 4096 / 2**20


class Watch:
    """The longest time for which the loop was held, and the most memory."""

    def __init__(self) -> None:
        #: In CPU time of the loop's thread, and in real time, which other programs lengthen.
        self.held = self.stall = 0.0
        self.memory = 0.0

    async def run(self) -> None:
        """Look every few milliseconds, until the task is cancelled."""
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK)
            self.stall = max(self.stall, time.perf_counter() - begin - TICK)
            self.held = max(self.held, time.thread_time() - cpu)
            self.memory = max(self.memory, resident())


async def followed(url: str, kind: str, rows: int) -> dict[str, float]:
    """Follow the table through one UPDATE, verify it, and return the figures."""
    with tempfile.TemporaryDirectory() as state:
        async with Postgres(url, state_dir=state, pool_size=3, stream_id=kind) as pg:
            async with pg.follow(TABLE, consumer="c", **OPTIONS[kind]) as follow:
                while not follow.progress.complete:
                    await (await anext(follow)).ack()  # type: ignore[union-attr]
                found = await measured(follow, url, rows)
            await pg.drop()
    return found


async def measured(follow: Follow, url: str, rows: int) -> dict[str, float]:
    """Update all rows, and take the transaction."""
    watch = Watch()
    before, cpu = resident(), time.process_time()
    watching = asyncio.create_task(watch.run())
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UPDATE.format(url=url, table=TABLE)
    )
    txn = await anext(follow)
    if not isinstance(txn, Transaction):
        raise AssertionError(f"{txn} instead of the transaction")
    updated = deleted = total = 0
    async for change in txn:
        if isinstance(change, Change) and change.new is not None:
            updated += 1
            total += change.new["amount"]
        else:
            deleted += 1
    await txn.ack()
    cpu = time.process_time() - cpu
    await asyncio.sleep(2 * TICK)  # the last stall is seen, too
    watching.cancel()
    await asyncio.wait([watching])
    if await writer.wait():
        raise SystemExit("the UPDATE has failed")
    amounts = range(2, rows + 2, 1 if not deleted else 2)
    if (updated + deleted, updated, total) != (rows, len(amounts), sum(amounts)):
        raise AssertionError(f"{updated} rows with {total} and {deleted} without a value")
    return {
        "held": watch.held * 1000,
        "stall": watch.stall * 1000,
        "memory": watch.memory - before,
        "cpu": cpu / rows * 1e6,
    }


def measure(report: Report, quick: bool) -> None:
    rows = 100_000 if quick else 1_000_000
    with SyncEmbeddedPostgres() as server:
        for kind in OPTIONS:
            fill(server.url, rows)
            found = side_process("mass_update.py", "--side", server.url, kind, rows)
            report.add(f"{kind}_loop_held_ms", Figure(found["held"], "ms"))
            report.add(f"{kind}_loop_stall_ms", Figure(found["stall"], "ms"))
            report.add(f"{kind}_rss_growth_mb", Figure(found["memory"], "MB"))
            report.add(f"{kind}_cpu_us_per_row", Figure(found["cpu"], "µs"))
    report.notes.append(f"one UPDATE of {rows:,} rows of six columns, in one transaction")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        url, kind, rows = sys.argv[2:]
        print(json.dumps(asyncio.run(followed(url, kind, int(rows)))))
    else:
        main("mass_update", __doc__ or "", measure)
