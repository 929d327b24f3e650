"""Rows and changes add up to the table while it is written to, on real servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import empty_database

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Tasks
from moored.postgres import Follow, Postgres
from moored.postgres.manage import _stack
from moored.postgres.snapshot import _reader
from moored.testing import base_seed, scaled

from .mirror import Copy, contents
from .writers import create, write_until

pytestmark = pytest.mark.timeout(600)

LIMIT = 120.0
ROWS = 120
#: The keys of the tables, by their kind; `id` of all others.
KEY = {"pair": ["day", "id"]}
ADDED = "alter table items add column note text default 'n'"
REPLACED = "alter table items drop column body, add column body text default 'b'"


async def apply(follow: Follow, copy: Copy) -> None:
    async for item in follow:
        copy.apply(item)
        await asyncio.sleep(0)
        if not hasattr(item, "reason"):
            await item.ack()


async def agrees(url: str, copy: Copy, task: asyncio.Task[None], *key: str, where: str) -> None:
    """Wait until the copy equals the table, which is not written to any more."""
    truth = await contents(url, "items", *key, where=where)
    different: list[Any] = []
    try:
        async with asyncio.timeout(LIMIT):
            while different := copy.differences(truth):
                if task.done():
                    task.result()
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{len(different)} rows differ: {different[:3]}") from None


async def until(condition: Callable[[], object]) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


def moved_on(copy: Copy, before: int) -> bool:
    return copy.copied != before or len(copy.rows) >= ROWS // 2


async def killing(url: str, copy: Copy, rng: random.Random) -> None:
    """Terminate a backend of the manager after every few rows, six times."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        for _ in range(6):
            before = copy.copied
            await until(partial(moved_on, copy, before))
            await asyncio.sleep(rng.uniform(0, 0.05))
            await conn.execute(
                "select pg_terminate_backend(pid) from (select pid from pg_stat_activity "
                "where application_name like 'moored%' order by random() limit 1) x"
            )


async def begun(pg: Postgres, copy: Copy, size: int, most: int) -> str:
    """Copy some rows with `snapshot()`; return where the follower continues."""
    async with pg.changes("c", tables=["items"]):
        await pg.wait_until_published("items", timeout=LIMIT)
    async with (
        pg.snapshot("items", chunk_rows=size) as snapshot,
        aclosing(snapshot.chunks()) as each,
    ):
        async for rows in each:
            copy.add(rows)
            if copy.copied >= most:
                break
            await asyncio.sleep(0.001 * len(rows))
        return str(snapshot.position)


async def schedule(
    url: str,
    state: Path,
    kind: str,
    seed: int,
    *,
    where: str | None = None,
    exact: bool = False,
    truncate: float = 0.02,
    kills: bool = False,
    alter: str | None = None,
    first: bool = False,
) -> Copy:
    """Follow a table while it is written to, and compare.

    :param alter: a statement that is executed while the table is copied.
    :param first: begin with a snapshot, and stop it somewhere: the follower continues it.
    """
    rng = random.Random(seed)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await create(conn, kind, ROWS)
        over, tasks = asyncio.Event(), Tasks()
        writing = tasks.start(write_until(url, kind, over, seed, truncate=truncate))
        name = "s_" + url.rpartition("/")[2]  # the slot of a failed test may be left on the server
        async with Postgres(
            url, state_dir=state, pool_size=3, stream_id=name, check_every=1.0
        ) as pg:
            copy = Copy(*KEY.get(kind, ["id"]), exact=exact)
            size = rng.choice([3, 17])
            start = await begun(pg, copy, size, rng.randrange(2 * ROWS)) if first else None
            async with pg.follow(
                "items", consumer="c", chunk_rows=size, where=where, start=start
            ) as f:
                following = tasks.start(apply(f, copy))
                if kills:
                    killer = tasks.start(killing(url, copy, rng))
                if alter is not None:
                    await until(lambda: copy.copied)
                    await conn.execute(alter.encode())
                if kills:
                    async with asyncio.timeout(LIMIT):
                        await killer
                await until(lambda: f.progress.complete)
                await asyncio.sleep(0.2)
                over.set()
                done = await writing
                await agrees(url, copy, following, *KEY.get(kind, ["id"]), where=where or "true")
            await tasks.cancel()
            await pg.drop()
    assert {"insert", "move", "delete", "update"} <= done.keys(), done
    return copy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stack, "BACKOFF", (0.05, 0.5))
    monkeypatch.setattr(_reader, "BACKOFF", (0.05, 0.5))


CASES: dict[str, dict[str, Any]] = {
    "int": {"kind": "int"},
    "exact": {"kind": "small", "exact": True, "truncate": 0.0},
    "text": {"kind": "text"},
    "pair": {"kind": "pair"},
    "where": {"kind": "int", "where": "amount % 3 = 0"},
    "killed": {"kind": "int", "kills": True},
    "altered": {"kind": "int", "alter": ADDED, "truncate": 0.0},
    "altered where": {"kind": "text", "alter": ADDED, "where": "amount % 3 = 0"},
    "replaced": {"kind": "pair", "alter": REPLACED, "truncate": 0.0},
    "partitioned": {"kind": "partitioned"},
    "snapshot": {"kind": "int", "first": True},
    "exact snapshot": {"kind": "small", "first": True, "exact": True, "truncate": 0.0},
}


#: Others like these stay in `make test`.
ALIKE = ("text", "altered", "exact snapshot")
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[SOAK] if case in ALIKE else []) for case in CASES]
)
async def test_rows_and_changes_add_up_to_the_table(
    postgres: SyncEmbeddedPostgres, tmp_path: Path, case: str
) -> None:
    await run(postgres, tmp_path, case)


@pytest.mark.parametrize(
    "case",
    ["int", *(pytest.param(case, marks=SOAK) for case in ("where", "snapshot", "partitioned"))],
)
async def test_rows_and_changes_add_up_to_the_table_of_an_older_server(
    older_postgres: SyncEmbeddedPostgres, tmp_path: Path, case: str
) -> None:
    await run(older_postgres, tmp_path, case)


async def run(server: SyncEmbeddedPostgres, state: Path, case: str) -> None:
    for seed in range(base_seed(), base_seed() + scaled(20)):
        with empty_database(server) as url:
            copy = await schedule(url, state / str(seed), seed=seed, **CASES[case])
            assert copy.copied
