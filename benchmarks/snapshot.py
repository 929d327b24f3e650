"""How fast is a table copied, against psql's \\copy and a cursor of asyncpg, and in what memory?"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import asyncpg
import psycopg

from _harness import Figure, Report, main, paired, side_process, spread
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Postgres

TABLE = "orders"


def fill(url: str, rows: int) -> None:
    """Create a table with rows of five columns."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"drop table if exists {TABLE}".encode())
        conn.execute(
            f"create table {TABLE} (id bigint primary key, customer int, price numeric(10, 2), "
            "state text, at timestamptz)".encode()
        )
        conn.execute(
            f"insert into {TABLE} select n, n % 1000, (n % 9999) / 100.0, 'state ' || n % 7, now() "
            f"from generate_series(1, {rows}) n".encode()
        )
        conn.execute(f"vacuum analyze {TABLE}".encode())


def psql(url: str, rows: int) -> float:
    """Return the rows per second of psql."""
    program = shutil.which("psql")
    if program is None:
        raise SystemExit("psql is not installed: this benchmark compares with it")
    begin = time.perf_counter()
    command = f"\\copy {TABLE} to /dev/null"
    subprocess.run([program, url, "-qXc", command], check=True, stdout=subprocess.DEVNULL)
    return rows / (time.perf_counter() - begin)


def cursor(url: str, rows: int) -> float:
    """Return the rows per second of a cursor of asyncpg."""

    async def run() -> float:
        conn = await asyncpg.connect(url)
        try:
            begin, count = time.perf_counter(), 0
            async with conn.transaction():
                async for _ in conn.cursor(f"select * from {TABLE}"):
                    count += 1
            if count != rows:
                raise AssertionError(f"{count} of {rows} rows")
            return rows / (time.perf_counter() - begin)
        finally:
            await conn.close()

    return asyncio.run(run())


async def copied(pg: Postgres, *, blocks: bool) -> int:
    """Copy the table, and return the number of rows."""
    count = 0
    async with pg.snapshot(TABLE) as snapshot:
        if blocks:
            async for block in snapshot.blocks():
                count += block.count(b"\n")
        else:
            async for _ in snapshot:
                count += 1
    return count


def ours(url: str, rows: int, *, blocks: bool) -> float:
    """Return the rows per second of a snapshot."""

    async def run() -> float:
        with tempfile.TemporaryDirectory() as state:
            async with Postgres(url, state_dir=state, pool_size=3) as pg:
                await pg.wait_until_active(30.0)
                begin = time.perf_counter()
                count = await copied(pg, blocks=blocks)
                took = time.perf_counter() - begin
        if count != rows:
            raise AssertionError(f"{count} of {rows} rows")
        return rows / took

    return asyncio.run(run())


def memory(url: str) -> dict[str, float]:
    """Copy the table in this process, and return by how much its memory has grown, in MB."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    async def run() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as state:
            async with Postgres(url, state_dir=state, pool_size=3) as pg:
                await pg.wait_until_active(30.0)
                async with pg.snapshot(TABLE) as snapshot:
                    count, before = 0, peak()
                    async for _ in snapshot:
                        count += 1
                        if count == 100_000:  # the buffers are as large as they get
                            before = peak()
        return {"rows": count, "grown": peak() - before}

    return asyncio.run(run())


def measure(report: Report, quick: bool) -> None:
    rows, rounds = (200_000, 3) if quick else (1_000_000, 5)
    with SyncEmbeddedPostgres() as server:
        url = server.url
        fill(url, rows)
        sides: tuple[tuple[str, bool, Callable[[str, int], float]], ...] = (
            ("snapshot_vs_psql_copy", True, psql),
            ("snapshot_rows_vs_asyncpg_cursor", False, cursor),
        )
        for name, blocks, peer in sides:
            speeds: list[float] = []

            def mine(blocks: bool = blocks, speeds: list[float] = speeds) -> float:
                speeds.append(ours(url, rows, blocks=blocks))
                return speeds[-1]

            def theirs(peer: Callable[[str, int], float] = peer) -> float:
                return peer(url, rows)

            report.add(name, paired(mine, theirs, rounds))
            report.add(f"{'blocks' if blocks else 'rows'}_per_s", spread(speeds, "rows/s"))
        if not quick:
            fill(url, 5_000_000)
        found = side_process("snapshot.py", "--memory", url)
        report.add("snapshot_rss_growth_mb", Figure(found["grown"], "MB"))
        report.notes.append(
            f"{rows:,} rows of five columns; memory over {found['rows']:,.0f} rows, "
            "after the first 100,000"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(memory(sys.argv[2])))
    else:
        main("snapshot", __doc__ or "", measure)
