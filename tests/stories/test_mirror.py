"""A mirror of a table is killed in its first second, again and again, deleted and rebuilt."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import psycopg
from tests.programs import Program
from tests.service.support import clean_environment

from moored.testing import base_seed, scaled

LIMIT = 90.0
ROWS = scaled(50_000, least=1_500)
KILLS = scaled(60, least=5)


@contextmanager
def mirroring(url: str, folder: Path) -> Iterator[Program]:
    log = folder / "log"
    arguments = (url, str(folder), str(folder / "mirror.db"))
    environ = clean_environment()
    program = Program("tests.stories.mirror", *arguments, log=log, environ=environ)
    with program:
        try:
            yield program
            assert program.returncode is None, log.read_text()
        finally:
            program.kill()


@asynccontextmanager
async def writing(url: str, chance: random.Random) -> AsyncIterator[None]:
    """Insert, update, move and delete rows until the block ends."""

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            while True:
                number, other = (chance.randrange(2 * ROWS) for _ in range(2))
                async with conn.transaction(force_rollback=chance.random() < 0.1):
                    await conn.execute("delete from orders where id = %s", [number])
                    await conn.execute("insert into orders values (%s, 'new')", [number])
                    if number != other:
                        await conn.execute("delete from orders where id = %s", [other])
                        await conn.execute(
                            "update orders set id = %s, item = 'moved' where id = %s",
                            [other, number],
                        )
                await asyncio.sleep(0.002)

    task = asyncio.create_task(write())
    yield
    task.cancel()
    await asyncio.wait([task])


async def until_equal(url: str, file: Path, program: Program) -> int:
    """Wait until the mirror has the rows of the table."""
    deadline = time.monotonic() + LIMIT
    async with await psycopg.AsyncConnection.connect(url) as conn:
        rows = await (await conn.execute("select id, item from orders order by id")).fetchall()
    while True:
        with closing(sqlite3.connect(file, timeout=30)) as mirror:
            found = mirror.execute("select id, item from orders order by id").fetchall()
            resets = mirror.execute("select * from resets").fetchall()
        if found == rows:
            assert resets == []
            return len(rows)
        assert program.returncode is None, "the mirror has ended"
        assert time.monotonic() < deadline, (len(found), len(rows), {*found} ^ {*rows})
        await asyncio.sleep(0.1)


async def test_a_mirror_that_is_killed_in_its_first_second_deleted_and_rebuilt(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    chance, file, rows, took = random.Random(base_seed()), tmp_path / "mirror.db", 0, list[float]()
    async with await psycopg.AsyncConnection.connect(postgres_url) as conn:
        await conn.execute("create table orders (id int primary key, item text)")
        series = "select 2 * n, 'old' from generate_series(1, %s) n"
        await conn.execute("insert into orders " + series, [ROWS])
    # New; deleted while the state directory still knows the consumer; and everything deleted.
    for lost in ([], ["mirror.db*"], ["mirror.db*", "default.db*"]):
        for pattern in lost:
            for path in tmp_path.glob(pattern):  # noqa: ASYNC240
                path.unlink()
        async with writing(postgres_url, chance):
            for _ in range(KILLS):
                with mirroring(postgres_url, tmp_path):
                    await asyncio.sleep(chance.uniform(0.05, 1.0))
        began = time.monotonic()
        with mirroring(postgres_url, tmp_path) as program:
            rows = await until_equal(postgres_url, file, program)
        took.append(time.monotonic() - began)
    figures(
        f"{rows:,} rows, new, deleted and with a lost state directory, each killed {KILLS} times: "
        f"0 missing, 0 doubled, 0 resets; equal {max(took):.1f} s after the last kill"
    )
