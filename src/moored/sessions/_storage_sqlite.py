"""A storage in one SQLite file: the default.

Writes that come while another commit is on its way to the disk go into one transaction, so that a
thousand accounts which write at once wait for a few syncs and not for a thousand. Several processes
of one machine may share the file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from ._errors import StorageError
from ._storage import Storage
from ._storage_thread import Job, StorageThread, settle

__all__ = ["SqliteStorage"]

T = TypeVar("T")

#: "HFst", in the header of the file: this is what it is for.
APPLICATION = 0x48467374
LAYOUT = 1

# Names are kept as bytes: not every Python string is text to SQLite.
_TABLES = """
create table if not exists profiles (profile blob primary key) without rowid;
create table if not exists records (
    profile blob not null,
    namespace blob not null,
    key blob not null,
    value blob not null,
    primary key (profile, namespace, key)
) without rowid;
"""


class SqliteStorage(Storage):
    """Records in the SQLite file at `path`, which only its owner may read.

    `patience` is how many seconds to wait for another process that has the file locked.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience: float = 5.0) -> None:
        self.path = Path(path)
        self.patience = patience
        #: Transactions so far, and the writes that were in them.
        self.commits = self.writes = 0
        self._thread: StorageThread | None = None
        self._database: sqlite3.Connection

    async def open(self) -> None:
        """Open or make the file; raises `StorageError` that says what to do."""
        if self._thread is not None:
            return
        thread = StorageThread(f"moored {self.path.name}", self._carry_out)
        self._thread = thread
        try:
            await thread.submit(self._connect, writes=False)
        except BaseException:
            self._thread = None
            thread.end(self._disconnect).add_done_callback(_seen)
            raise

    async def close(self) -> None:
        """Close the file, after everything that was asked for is done."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.end(self._disconnect)

    async def new(self, profile: str) -> bool:
        """Make a profile; False if it is there already."""
        return await self._write(lambda: self._make_profile(profile))

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None."""
        names = _raw(profile, namespace, key)
        # Another tool may have left a text there: it is damaged, and still bytes.
        value = "cast(value as blob)"
        query = f"select {value} from records where profile = ? and namespace = ? and key = ?"
        rows = await self._rows(query, *names)
        return bytes(rows[0]) if rows else None

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record."""
        row = (*_raw(profile, namespace, key), value)

        def write() -> None:
            self._make_profile(profile)
            self._database.execute(
                "insert into records values (?, ?, ?, ?) "
                "on conflict (profile, namespace, key) do update set value = excluded.value",
                row,
            )

        await self._write(write)

    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one."""
        query = "delete from records where profile = ? and namespace = ? and key = ?"
        names = _raw(profile, namespace, key)
        await self._write(lambda: self._database.execute(query, names))

    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records."""
        name = _raw(profile)

        def remove() -> None:
            self._database.execute("delete from records where profile = ?", name)
            self._database.execute("delete from profiles where profile = ?", name)

        await self._write(remove)

    async def list_profiles(self) -> list[str]:
        """All profiles, sorted."""
        return _texts(await self._rows("select profile from profiles"))

    async def namespaces(self, profile: str) -> list[str]:
        """The namespaces in which the profile has a record, sorted."""
        query = "select distinct namespace from records where profile = ?"
        return _texts(await self._rows(query, *_raw(profile)))

    async def keys(self, profile: str, namespace: str) -> list[str]:
        """The keys of the profile's records in a namespace, sorted."""
        query = "select key from records where profile = ? and namespace = ?"
        return _texts(await self._rows(query, *_raw(profile, namespace)))

    def __repr__(self) -> str:
        state = "open" if self._thread is not None else "closed"
        return f"<SqliteStorage {self.path}: {state}, {self.writes} writes, {self.commits} commits>"

    # -- on the loop ----------------------------------------------------------------------------

    async def _rows(self, query: str, *names: bytes) -> list[Any]:
        def read() -> list[Any]:
            return [row[0] for row in self._database.execute(query, names)]

        return await self._ask(read, writes=False)

    async def _write(self, call: Callable[[], T]) -> T:
        return await self._ask(call, writes=True)

    async def _ask(self, call: Callable[[], T], *, writes: bool) -> T:
        if self._thread is None:
            raise StorageError(f"{self.path} is not open: use `async with` on the storage")
        try:
            return await self._thread.submit(call, writes=writes)
        except sqlite3.Error as error:
            raise StorageError(f"{self.path}: {_advice(error, self.patience)}") from error

    # -- in the thread --------------------------------------------------------------------------

    def _carry_out(self, jobs: list[Job]) -> None:
        # What is read before the first write need not wait for a commit. What is read after it
        # must: nobody may see what is not yet durable.
        reads = list(takewhile(lambda job: not job.writes, jobs))
        for job in reads:
            job.run()
        settle(reads)
        if rest := jobs[len(reads) :]:
            self._commit(rest)
            settle(rest)

    def _commit(self, jobs: list[Job]) -> None:
        try:
            self._database.execute("begin immediate")
            for job in jobs:
                job.result = job.call()
            self._database.execute("commit")
        except Exception as error:
            self._roll_back()
            if len(jobs) > 1 and not isinstance(error, sqlite3.OperationalError):
                # One of them cannot be written. The others have nothing to do with that.
                for job in jobs:
                    self._commit([job])
                return
            for job in jobs:
                job.error = error
        else:
            self.commits += 1
            self.writes += sum(job.writes for job in jobs)

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            try:
                self._database.execute("rollback")
            except sqlite3.Error:
                # SQLite has done it already: some errors end the transaction.
                pass

    def _make_profile(self, profile: str) -> bool:
        query = "insert into profiles values (?) on conflict do nothing"
        return self._database.execute(query, _raw(profile)).rowcount == 1

    def _connect(self) -> None:
        try:
            self._make_file()
            self._database = sqlite3.connect(self.path, timeout=self.patience, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise
        except sqlite3.Error as error:
            raise StorageError(f"{self.path}: {_advice(error, self.patience)}") from error
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be used as storage: {error.strerror or error}; "
                "choose a path that can be written to"
            ) from error

    def _make_file(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Made here, because SQLite would let everybody read it; its other files are as this.
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            return
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _prepare(self) -> None:
        execute = self._database.execute
        # All at one moment: another process may be making the tables.
        execute("begin")
        application = execute("pragma application_id").fetchone()[0]
        layout = execute("pragma user_version").fetchone()[0]
        tables = execute("select count(*) from sqlite_master").fetchone()[0]
        execute("commit")
        if application != APPLICATION and (application or layout or tables):
            raise StorageError(
                f"{self.path} is the database of another program: choose another path"
            )
        if layout > LAYOUT:
            raise StorageError(
                f"{self.path} was written by a newer version of Moored (layout {layout}, "
                f"this one knows {LAYOUT}): use that version"
            )
        execute("pragma journal_mode = wal")
        execute("pragma synchronous = full")
        if layout < LAYOUT:
            # In one transaction: of two processes that make it at once, one waits for the other.
            self._database.executescript(
                f"begin immediate; {_TABLES} pragma application_id = {APPLICATION}; "
                f"pragma user_version = {LAYOUT}; commit;"
            )

    def _disconnect(self) -> None:
        database = getattr(self, "_database", None)
        if database is not None:
            database.close()


def _raw(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode("utf-8", "surrogatepass") for name in names)


def _texts(names: list[Any]) -> list[str]:
    return sorted(bytes(name).decode("utf-8", "surrogatepass") for name in names)


def _seen(future: Any) -> None:
    if not future.cancelled():
        future.exception()


def _advice(error: sqlite3.Error, patience: float) -> str:
    """What is wrong with the file, and what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return (
                f"another process has had it locked for {patience:g} s; find it (a backup? a shell "
                "with an open transaction?) and let it end"
            )
        case sqlite3.SQLITE_NOTADB:
            return "this is not a SQLite database; choose another path, or move the file away"
        case sqlite3.SQLITE_CORRUPT:
            return (
                f"the database is damaged ({error}); restore it from a backup, or save what can be "
                "saved with the `.recover` command of the sqlite3 program"
            )
        case sqlite3.SQLITE_FULL:
            return "the disk is full; nothing of this was written"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return (
                f"it cannot be written ({error}); look at the rights of the file and its directory"
            )
    return f"{error} ({type(error).__name__})"
