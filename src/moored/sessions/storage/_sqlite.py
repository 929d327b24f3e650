"""A storage in one SQLite file: the default.

Writes that arrive during a commit go into one transaction, so that a thousand accounts that write
at once wait for a few syncs and not for a thousand. Several processes of one machine may share the
file.
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Any

from .._errors import StorageError
from ._storage import Changes
from ._thread import Job, ThreadStorage, sync_directory

__all__ = ["SqliteStorage"]

#: The application id in the header of the file.
APPLICATION = 0x48467374
LAYOUT = 1

# Names are stored as bytes: SQLite does not accept every Python string as text.
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


_PUT = (
    "insert into records values (?, ?, ?, ?) "
    "on conflict (profile, namespace, key) do update set value = excluded.value"
)
_DELETE = "delete from records where profile = ? and namespace = ? and key = ?"


class SqliteStorage(ThreadStorage):
    """Records in the SQLite file at `path`, which only its owner may read.

    :param patience: seconds to wait for another process that has locked the file.
    """

    # UnicodeDecodeError: the message of SQLite quotes a damaged name.
    _failures = (sqlite3.Error, OSError, UnicodeDecodeError)
    _max_group = 1000

    def __init__(self, path: str | os.PathLike[str], *, patience: float = 5.0) -> None:
        super().__init__(path)
        self.patience = patience
        #: The number of transactions, and of the writes in them.
        self.commits = self.writes = 0
        self._database: sqlite3.Connection

    async def new(self, profile: str) -> bool:
        """Make a profile; False if it is there already."""
        return await self._do(lambda: self._make_profile(profile))

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None."""
        names = _raw(profile, namespace, key)
        # Another tool may have written text: return its bytes, which the checksum then refuses.
        value = "cast(value as blob)"
        query = f"select {value} from records where profile = ? and namespace = ? and key = ?"
        rows = await self._rows(query, *names)
        return bytes(rows[0]) if rows else None

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record."""
        await self.put_all(profile, {(namespace, key): value})

    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one."""
        await self.put_all(profile, {(namespace, key): None})

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and remove several records in one transaction."""
        rows = [(*_raw(profile, *place), value) for place, value in changes.items()]

        def write() -> None:
            for row in rows:
                if row[3] is None:
                    self._database.execute(_DELETE, row[:3])
                else:
                    self._make_profile(profile)
                    self._database.execute(_PUT, row)

        await self._do(write)

    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records."""
        name = _raw(profile)

        def remove() -> None:
            self._database.execute("delete from records where profile = ?", name)
            self._database.execute("delete from profiles where profile = ?", name)

        await self._do(remove)

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

    # -- on the loop ----------------------------------------------------------------------------

    async def _rows(self, query: str, *names: bytes) -> list[Any]:
        def read() -> list[Any]:
            return [row[0] for row in self._database.execute(query, names)]

        return await self._do(read, writes=False)

    # -- in the thread --------------------------------------------------------------------------

    def _carry_out(self, jobs: list[Job]) -> None:
        if jobs[0].writes:
            self._commit(jobs)
        else:
            super()._carry_out(jobs)

    def _commit(self, jobs: list[Job]) -> None:
        try:
            self._database.execute("begin immediate")
            for job in jobs:
                job.result = job.call()
            self._database.execute("commit")
        except Exception as error:
            self._roll_back()
            if len(jobs) > 1 and not isinstance(error, sqlite3.OperationalError):
                # One of them cannot be written: commit each alone, so that the others can.
                for job in jobs:
                    self._commit([job])
                return
            for job in jobs:
                job.error = error
        else:
            self.commits += 1
            self.writes += sum(bool(job.writes) for job in jobs)

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            try:
                self._database.execute("rollback")
            except sqlite3.Error:
                pass  # some errors have already ended the transaction

    def _make_profile(self, profile: str) -> bool:
        query = "insert into profiles values (?) on conflict do nothing"
        return self._database.execute(query, _raw(profile)).rowcount == 1

    def _take(self) -> None:
        self._make_file()
        self._database = sqlite3.connect(
            self.path, timeout=self.patience, isolation_level=None, check_same_thread=False
        )
        self._prepare()

    def _make_file(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Created here, because SQLite's file would be readable by all; its -wal file inherits
            # the mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            return
        sync_directory(self.path.parent)

    def _prepare(self) -> None:
        execute = self._database.execute
        # In one transaction: another process may be creating the tables.
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
                f"this one supports {LAYOUT}): use that version"
            )
        self._use_wal()
        execute("pragma synchronous = full")
        if layout < LAYOUT:
            # In one transaction: of two processes that create the file, one waits for the other.
            self._database.executescript(
                f"begin immediate; {_TABLES} pragma application_id = {APPLICATION}; "
                f"pragma user_version = {LAYOUT}; commit;"
            )

    def _use_wal(self) -> None:
        # SQLite ignores the timeout here, and fails while another process does the same.
        ends = time.monotonic() + self.patience
        while True:
            try:
                self._database.execute("pragma journal_mode = wal")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                    raise
            time.sleep(0.01)

    def _let_go(self) -> None:
        if hasattr(self, "_database"):
            self._database.close()

    def _advice(self, error: Exception) -> str:
        if isinstance(error, OSError):
            why = error.strerror or error
            return f"cannot be used as storage: {why}; choose a path that can be written to"
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return (
                    f"another process has kept the database locked for {self.patience:g} s; find "
                    "it (a backup? a shell with an open transaction?) and let it end"
                )
            case sqlite3.SQLITE_NOTADB:
                return "this is not a SQLite database; choose another path, or move the file away"
            case _ if isinstance(error, UnicodeDecodeError):
                return "the database is damaged; restore it from a backup"
            case sqlite3.SQLITE_CORRUPT:
                return (
                    f"the database is damaged ({error}); restore it from a backup, or save what "
                    "can be saved with the `.recover` command of the sqlite3 program"
                )
            case sqlite3.SQLITE_FULL:
                return "the disk is full; this change was not written"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                return (
                    f"it cannot be written ({error}); check the permissions of the file and its "
                    "directory"
                )
        return f"{error} ({type(error).__name__})"


def _raw(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode("utf-8", "surrogatepass") for name in names)


def _texts(names: list[Any]) -> list[str]:
    return sorted(bytes(name).decode("utf-8", "surrogatepass") for name in names)
