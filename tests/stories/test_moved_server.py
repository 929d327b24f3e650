"""The database moves to a newer server, by a dump or by pg_upgrade; the service goes on there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.servers import free_port
from tests.soaking import some_of
from tests.stories.support import (
    Callers,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
    until,
)

from moored.embedded import SyncEmbeddedPostgres
from moored.testing import scaled

ORDERS = scaled(1_000, least=50)
PASSWORD = "moved"


def run(server: SyncEmbeddedPostgres, program: str, *arguments: str, cwd: Path) -> None:
    """Run a program of PostgreSQL as the user who owns the data."""
    assert server.bin_dir is not None
    owner = (cwd / "new" / "data").stat().st_uid
    os.chown(cwd, owner, -1)
    done = subprocess.run(
        [str(server.bin_dir / program), *arguments],
        cwd=cwd,
        env={**os.environ, "PGPASSWORD": PASSWORD},
        user=owner if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def dumped(old: SyncEmbeddedPostgres, new: SyncEmbeddedPostgres, folder: Path) -> None:
    run(new, "pg_dump", "-d", old.url, "-f", "dump.sql", cwd=folder)
    run(new, "psql", "-q", "-v", "ON_ERROR_STOP=1", "-d", new.url, "-f", "dump.sql", cwd=folder)
    old.stop()


def upgraded(old: SyncEmbeddedPostgres, new: SyncEmbeddedPostgres, folder: Path) -> None:
    binaries = ["-b", str(old.bin_dir), "-B", str(new.bin_dir)]
    data = [str(folder / "old" / "data"), str(folder / "new" / "data")]
    new.stop()
    old.stop()
    run(new, "pg_checksums", "--disable", "-D", data[1], cwd=folder)  # the old one has none
    run(new, "pg_upgrade", *binaries, "-d", data[0], "-D", data[1], "-U", "postgres", cwd=folder)
    new.start()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which another user than root may work: PostgreSQL refuses to run as root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("move", some_of([dumped, upgraded], dumped))
async def test_a_server_that_is_moved(
    open_folder: Path, figures: Callable[[str], None], move: Callable[..., None]
) -> None:
    with (
        SyncEmbeddedPostgres(open_folder / "old", version=16, password=PASSWORD) as old,
        SyncEmbeddedPostgres(open_folder / "new", version=18, password=PASSWORD) as new,
    ):
        port, whose, folder = free_port(), tenants(3), open_folder
        await migrate(old.url)
        async with replica(old.url, folder, port) as shop:
            await shop.ready()
            async with attached(shop.url, *whose) as browsers:
                async with Callers(shop.url, whose) as callers:
                    await callers.succeed(ORDERS)
                before = await all_seen(old.url, browsers)
                await all_copied(old.url)
                await shop.ended()
                async with await psycopg.AsyncConnection.connect(old.url) as conn:
                    offline = "insert into orders select -n, %s from generate_series(1, 10) n"
                    await conn.execute(offline, [whose[0]])
                await asyncio.to_thread(move, old, new, folder)
                began = time.monotonic()
                async with replica(new.url, folder, port) as shop:
                    await shop.ready()
                    await until(lambda: all(each.resets for each in browsers), "a reset")
                    reason = browsers[0].resets[0]
                    for each in browsers:
                        assert len(each.resets) == 1
                        each.resets.clear()
                        each.seen.clear()
                    async with Callers(shop.url, whose) as callers:
                        await callers.succeed(ORDERS)
                    after = await all_seen(new.url, browsers, since=callers.first)
                    orders, _ = await all_copied(new.url)
                    took = time.monotonic() - began
                    await shop.ended()
        async with await psycopg.AsyncConnection.connect(new.url) as conn:
            resets = await (await conn.execute("table resets")).fetchall()
    assert orders == before + 10 + after
    assert "another database" in reason
    assert ["another database" in each for (each,) in resets] == [True]
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"{before} orders before the move, 10 meanwhile, {after} afterwards: all {orders} are in "
        f"the copy, and with the browsers; all works after {took:.1f} s, "
        "with one reset each"
    )
