"""What must survive this process, in one small file: which history, who consumes, how far.

Every method is one transaction of SQLite, and durable when it returns.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .._errors import ConfigurationError, StateError
from .._lsn import Lsn
from .._position import History
from ._continuity import NO_COMMIT, CommitMark

__all__ = ["Resets", "Saved", "StateStore"]

#: How many seconds to wait for another process that reads or writes the file.
PATIENCE = 5.0

NOTHING: Mapping[str, int] = MappingProxyType({})

_LAYOUT = """
create table if not exists facts (name text primary key, value text not null) without rowid;
create table if not exists consumers (
    name text primary key,
    acknowledged text,  -- null for one that begins anew
    delivered text,     -- the end of the last transaction of its own; null if that is not known
    reset text          -- why it must begin anew, until it was told
) without rowid;
create table if not exists followed (  -- the tables that a consumer follows, as JSON
    consumer text primary key, tables text not null
) without rowid;
"""


class Saved(NamedTuple):
    """A consumer, as it was saved."""

    acknowledged: Lsn | None
    #: Why it must begin anew; None once it was told.
    reset: str | None
    #: The end of the last transaction that it acknowledged.
    delivered: Lsn = Lsn(0)
    #: The tables that it follows, as they were when they were last confirmed.
    followed: str | None = None


class Resets(NamedTuple):
    """How often everybody had to begin anew, and why the last time."""

    times: int
    reason: str


class StateStore:
    """The file of one stream, safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            _make_private(path)
            self._database = sqlite3.connect(
                path, timeout=PATIENCE, check_same_thread=False, isolation_level=None
            )
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise ConfigurationError(
                f"the state of the stream cannot be kept in {path}: {error}. Choose a state_dir "
                "that can be written to; a file that is damaged is best moved away: consumers "
                "that are there at the start then go on where the slot stands"
            ) from error

    def _prepare(self) -> None:
        try:
            # Not "wal": instances that take turns may have it on a volume that they share.
            self._database.execute("pragma journal_mode = truncate")
            self._database.execute("pragma synchronous = full")
            self._database.executescript(_LAYOUT)
        except sqlite3.Error:
            self._database.close()
            raise

    def history(self) -> History | None:
        """The database and timeline that everything here belongs to."""
        text = self._fact("history")
        if text is None:
            return None
        system_id, _, timeline_id = text.partition("/")
        return History(system_id, int(timeline_id))

    def told(self) -> Lsn | None:
        """How far the server was told, at most, that everything is safe."""
        text = self._fact("told")
        return None if text is None else Lsn.parse(text)

    def last(self) -> CommitMark:
        """The last commit that was received, if that is known."""
        text = self._fact("last")
        return NO_COMMIT if text is None else CommitMark.parse(text)

    def resets(self) -> Resets:
        """How often everybody had to begin anew, and why the last time."""
        with self._used():
            return self._resets()

    def consumers(self) -> dict[str, Saved]:
        """All that were ever here and were not dropped."""
        with self._used():
            return self._consumers()

    def save(
        self,
        told: Lsn,
        acknowledged: Mapping[str, int],
        delivered: Mapping[str, int] = NOTHING,
        *,
        last: CommitMark = NO_COMMIT,
        times_reset: int = 0,
    ) -> None:
        """How far everybody is, before the server is told.

        Nobody forgets what was told or acknowledged: the one of two that comes late changes
        nothing. That may be another process, which has not heard of a reset yet.
        """
        with self._transaction():
            if self._resets().times != times_reset:
                return
            before = self._value("told")
            if before is None or told > Lsn.parse(before):
                self._set("told", str(told))
            before = self._value("last")
            if last != NO_COMMIT and (before is None or last > CommitMark.parse(before)):
                self._set("last", str(last))
            known = self._consumers()
            self._database.executemany(
                "update consumers set acknowledged = ?, delivered = ? where name = ?",
                [
                    (str(Lsn(at)), str(Lsn(delivered.get(name, 0))), name)
                    for name, at in acknowledged.items()
                    if name in known and at > (known[name].acknowledged or -1)
                ],
            )

    def add(self, name: str, acknowledged: int | None) -> None:
        """A consumer, new or at a place of its own choice."""
        at = None if acknowledged is None else str(Lsn(acknowledged))
        with self._transaction():
            self._database.execute(
                "insert into consumers (name, acknowledged) values (?, ?) "
                "on conflict (name) do update set acknowledged = excluded.acknowledged",
                (name, at),
            )

    def drop(self, name: str) -> None:
        """A consumer that does not come back."""
        with self._transaction():
            self._database.execute("delete from consumers where name = ?", (name,))
            self._database.execute("delete from followed where consumer = ?", (name,))

    def reset(self, reason: str, name: str | None = None) -> None:
        """History is not what it was: all consumers (or this one) begin anew, and are told why."""
        with self._transaction():
            if name is None:
                self._database.execute("delete from facts where name in ('told', 'last')")
                self._database.execute("delete from followed")
                self._set("resets", f"{self._resets().times + 1} {reason}")
            self._database.execute(
                "update consumers set acknowledged = null, delivered = null, reset = ? "
                "where name = coalesce(?, name)",
                (reason, name),
            )

    def was_told(self, name: str, reason: str) -> None:
        """A consumer knows that it begins anew, for this reason."""
        with self._transaction():
            self._database.execute(
                "update consumers set reset = null where name = ? and reset = ?", (name, reason)
            )

    def follow(self, followed: Mapping[str, str]) -> None:
        """Keep which tables consumers follow."""
        with self._transaction():
            self._database.executemany(
                "insert or replace into followed values (?, ?)", followed.items()
            )

    def give_up(self, reason: str) -> None:
        """The slot cannot be read any more: whatever the next one is, everybody begins anew."""
        with self._transaction():
            self._set("given_up", reason)

    def given_up(self) -> str | None:
        """Why the slot was given up; None if it was not, or if everybody was told."""
        return self._fact("given_up")

    def set_history(self, history: History, stands_at: Lsn | None = None) -> None:
        """Everything here belongs to this history from now on: the last step of a reset.

        A slot that is new to us is where it would be if it had been told so: whoever finds it
        elsewhere later knows that it was moved, or made anew.
        """
        with self._transaction():
            self._set("history", str(history))
            self._database.execute("delete from facts where name = 'given_up'")
            if stands_at is not None and self._value("told") is None:
                self._set("told", str(stands_at))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Use the file alone; an error of SQLite is raised as one that names the file."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StateError(self._advice(error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One transaction, with the file's lock taken at its beginning."""
        with self._used():
            try:
                self._database.execute("begin immediate")
                yield
                self._database.execute("commit")
            except BaseException:
                # A commit that fails leaves the transaction open; a full disk may have ended it.
                with suppress(sqlite3.Error):
                    self._database.execute("rollback")
                raise

    def _advice(self, error: sqlite3.Error) -> str:
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_BUSY:
                return (
                    f"another process has had the state file {self.path} locked for more than "
                    f"{PATIENCE:g} s: find it (a backup? a shell with an open transaction?), and "
                    "let it end"
                )
            case sqlite3.SQLITE_FULL:
                return f"the disk of the state file {self.path} is full: free some space there"
        return f"the state file {self.path} cannot be used: {error}"

    def _consumers(self) -> dict[str, Saved]:
        rows = self._database.execute(
            "select name, acknowledged, reset, coalesce(delivered, '0/0'), tables "
            "from consumers left join followed on consumer = name"
        )
        return {
            name: Saved(None if at is None else Lsn.parse(at), reset, Lsn.parse(delivered), tables)
            for name, at, reset, delivered, tables in rows
        }

    def _resets(self) -> Resets:
        times, _, reason = (self._value("resets") or "0 ").partition(" ")
        return Resets(int(times), reason)

    def _fact(self, name: str) -> str | None:
        with self._used():
            return self._value(name)

    def _value(self, name: str) -> str | None:
        found = self._database.execute("select value from facts where name = ?", (name,))
        row = found.fetchone()
        return None if row is None else str(row[0])

    def _set(self, name: str, value: str) -> None:
        self._database.execute(
            "insert into facts values (?, ?) "
            "on conflict (name) do update set value = excluded.value",
            (name, value),
        )

    def __repr__(self) -> str:
        return f"<StateStore {self.path}>"


def _make_private(path: Path) -> None:
    """Create the file, for this user alone: SQLite would let everybody read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
