"""The directory of the stored positions is full, locked and lost; the service goes on."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.stories.support import (
    Browser,
    Callers,
    Replica,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
    until,
)

from moored.testing import scaled

#: Seconds for which the disk is full; and the file locked: longer than the 5 s of a busy file.
FULL, LOCKED = scaled(60, least=1), scaled(60, least=6)
REQUESTS = scaled(500, least=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of its own of 1 MB."""
    folder = tmp_path / "state"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a disk here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    ballast, left = folder / "ballast", shutil.disk_usage(folder).free
    ballast.write_bytes(bytes(left))
    yield
    ballast.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with closing(sqlite3.connect(folder / "default.db", isolation_level=None)) as file:
        file.execute("begin exclusive")
        yield


@contextmanager
def lost(folder: Path) -> Iterator[None]:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield


@asynccontextmanager
async def used(shop: Replica, browsers: list[Browser]) -> AsyncIterator[Callers]:
    """Order before, during and after the block; no request fails, or waits."""
    async with Callers(shop.url, [each.tenant for each in browsers]) as callers:
        await callers.succeed(REQUESTS)
        yield callers
        await callers.succeed(REQUESTS)
    assert callers.answers.keys() == {200}
    assert callers.slowest < 3


async def test_a_state_directory_that_is_full_locked_and_lost(
    postgres_url: str, small_disk: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    whose, slowest, repeated = tenants(2), list[float](), list[int]()
    async with replica(postgres_url, small_disk) as shop:
        await shop.ready()
        async with attached(shop.url, *whose) as browsers:
            for fault, lasts, said in (
                (full, FULL, "is full"),
                (locked, LOCKED, "locked"),
                (lost, 1, ""),
            ):
                async with used(shop, browsers) as callers:
                    with fault(small_disk):
                        await asyncio.sleep(lasts)
                        await until(lambda: said in "\n".join(shop.lines), said)  # noqa: B023
                await all_seen(postgres_url, browsers)
                repeated.append((await all_copied(postgres_url))[1])
                slowest.append(callers.slowest)
            await shop.ready()
        await shop.ended()
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    assert log.count("was deleted or replaced: opened it again") == 1, log
    assert (small_disk / "default.db").exists()
    async with await psycopg.AsyncConnection.connect(postgres_url) as conn:
        order = "insert into orders select -n, %s from generate_series(1, 100) n"
        await conn.execute(order, whose[:1])
    async with replica(postgres_url, small_disk) as shop:
        await shop.ready()
        orders, twice = await all_copied(postgres_url)
        await shop.ended()
    figures(
        f"full for {FULL} s, locked for {LOCKED} s, then lost: {orders} orders, 0 requests "
        f"failed, the slowest {1e3 * max(slowest):.0f} ms, 0 events missed or doubled; missing "
        f"in the copy 0, copied twice {repeated}, and after a restart {twice}"
    )
