"""A process that follows a table is killed and started again while it copies."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.programs import Program

from moored.kernel import Tasks
from moored.testing import base_seed, scaled

from .mirror import contents
from .writers import create, write_until

pytestmark = pytest.mark.timeout(300)

ROWS = 150
LIMIT = 90.0


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "at least once"])
async def test_a_killed_follower_continues_its_copy(
    streamed_url: str, tmp_path: Path, exact: bool
) -> None:
    """With the position stored by the follower itself, no change is applied twice."""
    rng = random.Random(base_seed())
    # The changes of a moved row with a large value may find no row: docs/topics/snapshots.md.
    kind = "small" if exact else "int"
    over, tasks = asyncio.Event(), Tasks()
    config = {
        "url": streamed_url,
        "state_dir": str(tmp_path / "state"),
        "path": str(tmp_path / "copy.db"),
        "exact": exact,
    }
    async with await psycopg.AsyncConnection.connect(streamed_url, autocommit=True) as conn:
        await create(conn, kind, ROWS)
    writing = tasks.start(write_until(streamed_url, kind, over, base_seed(), most=2 * ROWS))
    for number in range(scaled(40, least=4)):
        # Killed in the middle of its copy, then a little later each time.
        await asyncio.to_thread(run_until, config, tmp_path, rng.randint(2, 8 + number))
    over.set()
    done = await writing
    assert {"insert", "move", "delete", "update"} <= done.keys(), done
    truth = await contents(streamed_url, "items", "id")
    with Program("tests.snapshot.follow_program", json.dumps(config), log=tmp_path / "log") as last:
        try:
            async with asyncio.timeout(LIMIT):
                while different(tmp_path / "copy.db", truth):
                    assert last.returncode is None, (tmp_path / "log").read_text()[-3000:]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(different(tmp_path / "copy.db", truth)[:3]) from None
        finally:
            last.kill()


def run_until(config: dict[str, Any], directory: Path, items: int) -> None:
    """Run the follower, and kill it when it has applied so many items."""
    with Program(
        "tests.snapshot.follow_program", json.dumps(config), log=directory / "log"
    ) as program:
        for _ in range(items):
            if not program.stdout.readline():
                raise AssertionError((directory / "log").read_text()[-3000:])
        program.kill()


def different(path: Path, truth: dict[Any, dict[str, Any]]) -> list[Any]:
    """Return the rows that differ."""
    with sqlite3.connect(path) as database:
        rows = {row[0]: row for row in database.execute("select * from items")}
    theirs = {key: tuple(row.values()) for (key,), row in truth.items()}
    return [(key, rows.get(key), theirs.get(key)) for key in rows.keys() | theirs.keys()
            if rows.get(key) != theirs.get(key)]  # fmt: skip
