"""Servers with backups, restores, standbys, and copies of their disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.servers import give

from moored.embedded import EmbeddedPostgres
from moored.postgres import Changes, Reset

from .server import connected, ids, one, until

__all__ = ["Cluster", "Seen", "cluster", "standby_of"]

_PASSWORD = "secret"
#: It is the order of things that is tested, not the disk.
_QUICK = {"fsync": "off", "max_wal_senders": "6", "max_replication_slots": "6"}


@contextmanager
def _place() -> Iterator[Path]:
    """A directory that the user of the server process can enter."""
    path = Path(tempfile.mkdtemp(prefix="moored-cluster-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Seen:
    """Collects and acknowledges everything that a consumer receives."""

    def __init__(self, changes: Changes) -> None:
        self.items: list[object] = []
        self._task = asyncio.create_task(self._take(changes))

    async def _take(self, changes: Changes) -> None:
        async for item in changes:
            if isinstance(item, Reset):
                self.items.append(item.reason)
            else:
                self.items += ids(item)
                await item.ack()

    async def until(self, *expected: object) -> None:
        """Wait until exactly these items were received."""

        async def there() -> bool:
            return len(self.items) >= len(expected)

        await until(there)
        assert self.items == list(expected), self.items

    async def reset(self) -> str:
        """Wait for a reset, and return its reason."""

        async def there() -> bool:
            return any(isinstance(item, str) for item in self.items)

        await until(there)
        return next(item for item in reversed(self.items) if isinstance(item, str))


class Cluster:
    """A server with an archive of its log, and what an operator does with it."""

    def __init__(self, path: Path, options: dict[str, str], port: int = 0) -> None:
        self.path = path
        self.archive = path / "archive"
        self.archive.mkdir()
        self.archive.chmod(0o777)
        archived = f'cp "%p" "{self.archive}/%f"'
        if options.get("archive_mode") == "on":
            options = {"archive_command": archived, **options}
        self._options = {**_QUICK, **options}
        self.server = self._at(port)

    def _at(self, port: int) -> EmbeddedPostgres:
        path, options = self.path / "server", self._options
        return EmbeddedPostgres(path, port=port, password=_PASSWORD, options=options)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def data(self) -> Path:
        """What PostgreSQL calls its data directory."""
        return self.server.data_dir / "data"

    async def sql(self, *statements: str) -> None:
        """Run statements, each as a transaction."""
        async with connected(self.url) as conn:
            for statement in statements:
                await conn.execute(statement.encode())

    async def ask(self, query: str, *values: Any) -> Any:
        """The first value of a query."""
        async with connected(self.url) as conn:
            return await one(conn, query, *values)

    async def make_table(self) -> None:
        """The table that is written to."""
        await self.sql("create table orders (id int primary key, name text)")

    async def insert(self, *numbers: int) -> None:
        """One transaction for each number."""
        await self.sql(*(f"insert into orders values ({number}, 'x')" for number in numbers))

    # -- what an operator does -----------------------------------------------------------------

    async def run(self, program: str, *arguments: str, **options: Any) -> None:
        """Run one of PostgreSQL's programs."""
        assert self.server.bin_dir is not None
        command = [str(self.server.bin_dir / program), *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, said.decode()

    async def back_up(self, *options: str) -> Path:
        """A base backup of it, by PostgreSQL's own program."""
        place = Path(tempfile.mkdtemp(prefix="base-", dir=self.path)) / "data"
        fixed = ["-X", "fetch", "--checkpoint=fast", "--no-sync"]
        await self.run("pg_basebackup", "-d", self.url, "-D", str(place), *fixed, *options)
        return place

    async def restore_point(self, name: str) -> None:
        """A point to come back to, safe in the archive."""
        await self.sql(f"select pg_create_restore_point('{name}')")
        needed = await self.ask("select pg_walfile_name(pg_switch_wal())")
        query = "select last_archived_wal >= %s from pg_stat_archiver"
        await until(lambda: self.ask(query, needed))

    async def restore(self, backup: Path, point: str) -> None:
        """Bring the backup back, up to the point, under the same address: a new timeline."""
        await self.server.stop()
        self.replace_data(backup)
        self.configure(
            restore_command=f'cp "{self.archive}/%f" "%p"',
            recovery_target_name=point,
            recovery_target_action="promote",
        )
        (self.data / "recovery.signal").touch()
        await self.server.start()
        await self.promoted()

    async def promoted(self) -> None:
        """Wait until the server accepts writes."""
        await until(lambda: self.ask("select not pg_is_in_recovery()"))

    def replace_data(self, copy: Path) -> None:
        """Replace the data directory of the stopped server by a copy, with the same owner."""
        old = self.data.rename(self.data.with_name("old"))
        shutil.copytree(copy, self.data)
        give(self.data, like=old)
        shutil.rmtree(old)

    def copy_data(self) -> Path:
        """A copy of the disk; the server must be stopped."""
        copy = Path(tempfile.mkdtemp(prefix="copy-", dir=self.path)) / "data"
        shutil.copytree(self.data, copy)
        return copy

    def remove_data(self) -> None:
        """Have the next start make a new database; the server must be stopped."""
        shutil.rmtree(self.data)

    async def switch_log(self, times: int) -> None:
        """Have the log go on in a later segment."""
        for _ in range(times):
            await self.sql(
                "select pg_switch_wal()", "select pg_logical_emit_message(false, '', '')"
            )

    def configure(self, **settings: str) -> None:
        """Append settings, which override earlier ones."""
        with (self.data / "postgresql.auto.conf").open("a") as file:
            for name, value in settings.items():
                file.write(f"{name} = '{value}'\n")

    async def move_log(self, segment: str) -> None:
        """Let the WAL of the stopped server continue at another segment."""
        user = self.data.stat().st_uid
        options = {"user": user, "group": self.data.stat().st_gid} if os.geteuid() == 0 else {}
        await self.run("pg_resetwal", "-D", str(self.data), "-l", segment, **options)

    # -- of a standby --------------------------------------------------------------------------

    async def caught_up_with(self, primary: Cluster) -> None:
        """Wait until the standby has caught up with the primary."""
        at = await primary.ask("select pg_current_wal_lsn()")
        await until(lambda: self.ask("select pg_last_wal_replay_lsn() >= %s", at))

    async def move_to(self, port: int) -> None:
        """Start the server on another port."""
        await self.server.stop()
        self.server = self._at(port)
        await self.server.start()

    async def promote(self) -> None:
        """Promote the standby."""
        await self.sql("select pg_promote()")
        await self.promoted()

    # -- life ----------------------------------------------------------------------------------

    async def end(self) -> None:
        """Kill the server."""
        if self.server.state != "stopped":
            await self.server.kill() if self.server.running else None
            await self.server.stop()


@asynccontextmanager
async def cluster(**options: str) -> AsyncIterator[Cluster]:
    """A server with a table to write to."""
    with _place() as path:
        made = Cluster(path, options)
        await made.server.start()
        try:
            await made.make_table()
            yield made
        finally:
            await made.end()


@asynccontextmanager
async def standby_of(primary: Cluster, slot: str | None = None) -> AsyncIterator[Cluster]:
    """A standby of it; with a slot for itself there, it also keeps copies of those for failover."""
    with _place() as path:
        made = Cluster(path, {"hot_standby_feedback": "on"})
        (path / "server").mkdir(mode=0o711)
        backup = await primary.back_up("--write-recovery-conf")
        shutil.copytree(backup, path / "server" / "data")
        give(path / "server" / "data", like=primary.data)
        # What the primary waits for, the standby must not.
        made.configure(synchronized_standby_slots="")
        if slot is not None:
            made.configure(primary_slot_name=slot, sync_replication_slots="on")
        await made.server.start()
        try:
            yield made
        finally:
            await made.end()
