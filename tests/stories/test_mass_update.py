"""Each row of a table is updated in one transaction, while the service answers and delivers."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import psutil
import psycopg
from tests.servers import free_port
from tests.stories.support import (
    Callers,
    Replica,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
)

from moored.testing import base_seed, scaled

ROWS = scaled(1_000_000, least=10_000)
KINDS = {"plain": "", "columns": "", "where": "where price % 2 = 0"}
COMMAND = ("uvicorn", "tests.stories.stock:api")
TABLE = "create table items (id int primary key, price int not null, note text)"
FILL = "insert into items select n, n, 'note ' || n from generate_series(1, %s) n"
UPDATE = "update items set price = price + 1, note = note || '!'"
#: The number of rows, and two sums of them; in a mirror, also how many changes it got.
SUMS = "select count(*), sum(id), sum(cast(id as bigint) * price) from items"
CHANGES = f"select *, (select coalesce(sum(changes), 0) from progress) from ({SUMS})"
#: Seconds until all mirrors are equal; and until a request is answered, or an event delivered.
EQUAL, WAIT = scaled(600, least=180), 10.0


def in_mirror(file: Path) -> list[int]:
    """Return the sums of a mirror, and how many changes it got."""
    with closing(sqlite3.connect(file, timeout=30)) as mirror:
        return [*mirror.execute(CHANGES).fetchone()]


async def until_equal(url: str, folder: Path, updates: int) -> float:
    """Wait until each mirror has all rows and got each change once; return the seconds."""
    began = time.monotonic()
    async with await psycopg.AsyncConnection.connect(url) as conn:
        for kind, where in KINDS.items():
            row = await (await conn.execute(f"{SUMS} {where}".encode())).fetchone()
            assert row is not None
            wanted = [*map(int, row), updates * ROWS]
            found = list[int]()
            while found != wanted:
                assert time.monotonic() < began + EQUAL, (kind, found, wanted)
                await asyncio.sleep(0.2)
                found = await asyncio.to_thread(in_mirror, folder / f"{kind}.mirror")
                assert found[-1] <= wanted[-1], f"{kind}: changes came twice"
    return time.monotonic() - began


@asynccontextmanager
async def growth(shop: Replica) -> AsyncIterator[list[int]]:
    """Give how much more memory the process has at most than at the beginning of the block."""
    process = psutil.Process(shop.process.pid)
    before, most = process.memory_info().rss, [0]

    async def watch() -> None:
        while True:
            most[0] = max(most[0], process.memory_info().rss - before)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield most
    finally:
        watching.cancel()


async def test_a_mass_update(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    port, whose, logs = free_port(), tenants(3), list[str]()
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
        await conn.execute(TABLE)
        await conn.execute(FILL, [ROWS])
        async with replica(postgres_url, tmp_path, port, command=COMMAND) as shop:
            await shop.ready()
            copied = await until_equal(postgres_url, tmp_path, 0)
            async with attached(shop.url, *whose) as browsers:
                async with Callers(shop.url, whose) as callers, growth(shop) as grown:
                    await conn.execute(UPDATE)
                    equal = await until_equal(postgres_url, tmp_path, 1)
                await all_seen(postgres_url, browsers)
                arrived = {number: at for each in browsers for number, at in each.at.items()}
                late = max(arrived[number] - at for number, at in callers.began.items())
                # Once more, and the process is killed in the middle.
                await conn.execute(UPDATE)
                await asyncio.sleep(random.Random(base_seed()).uniform(0.1, equal))
                await shop.ended(signal.SIGKILL)
                logs += shop.lines
                async with replica(postgres_url, tmp_path, port, command=COMMAND) as shop:
                    again = await until_equal(postgres_url, tmp_path, 2)
                    orders, twice = await all_copied(postgres_url)
                    seen = await all_seen(postgres_url, browsers)
                    await shop.ended()
                    logs += shop.lines
    assert callers.answers.keys() == {200}
    assert (callers.slowest < WAIT, late < WAIT) == (True, True), (callers.slowest, late)
    assert grown[0] < 100e6
    log = "\n".join(logs)
    assert "Traceback" not in log, log
    figures(
        f"{ROWS:,} rows copied in {copied:.1f} s and updated, in 3 mirrors after {equal:.1f} s and "
        f"after {again:.1f} s with a kill -9: 0 missed, 0 doubled; {orders} requests meanwhile, "
        f"0 failed, the slowest {callers.slowest:.1f} s, copied twice {twice}; {seen} events, "
        f"0 missed, 0 doubled, the slowest {late:.1f} s; memory + {grown[0] / 1e6:.0f} MB"
    )
