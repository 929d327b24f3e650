"""The state that must survive the process, in an SQLite file: history, consumers, positions.

Every method is one transaction, and durable when it returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from moored.kernel import describe, in_thread

from .._errors import ConfigurationError, StateError
from .._lsn import Lsn
from .._position import History
from ._consumer import Reset
from ._continuity import NO_COMMIT, CommitMark

__all__ = ["Resets", "Saved", "StateStore", "StoredState", "stored"]

log = logging.getLogger("moored.postgres")

P = ParamSpec("P")
T = TypeVar("T")

#: How many seconds to wait for another process that reads or writes the file.
PATIENCE = 5.0

#: The stored position at which the slot was created.
SLOT_CREATED = "slot created"
#: Why the slot was given up.
GIVEN_UP = "given_up"
#: What precedes the name of a consumer in the name of the fact with the state of its copy.
_COPY = "copy "

#: The device and the inode of a file.
Identity = tuple[int, int]

NOTHING: Mapping[str, int] = MappingProxyType({})

_LAYOUT = """
create table if not exists facts (name text primary key, value text not null) without rowid;
create table if not exists consumers (
    name text primary key,
    acknowledged text,  -- null before its first position, and after a reset
    delivered text,     -- the end of its last acknowledged own transaction; null if unknown
    reset text,         -- the reason of a reset that it has not handled yet
    reset_number integer not null default 0
) without rowid;
create table if not exists followed (  -- the tables that a consumer follows, as JSON
    consumer text primary key, tables text not null
) without rowid;
"""

#: The tables, and the placeholders of their columns.
_TABLES = {"facts": "?, ?", "consumers": "?, ?, ?, ?, ?", "followed": "?, ?"}


def stored(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> asyncio.Future[T]:
    """Run a method of the store in a thread of its own.

    The event loop's executor will not do: blocking calls of the application may occupy all of its
    threads, and the stream would end.
    """
    return in_thread(partial(call, *args, **options), name="moored state file")


class Saved(NamedTuple):
    """The stored state of a consumer."""

    acknowledged: Lsn | None
    #: The reset that it has not handled yet.
    reset: Reset | None
    #: The end of the last transaction that it has acknowledged.
    delivered: Lsn = Lsn(0)
    #: The tables that it follows, as they were last confirmed, serialized.
    followed: str | None = None


class Resets(NamedTuple):
    """The number of resets of all consumers, and the reason of the last one."""

    times: int
    reason: str


class StoredState(NamedTuple):
    """What the file has, except for copies of tables."""

    consumers: dict[str, Saved]
    resets: Resets
    #: The last received commit.
    last: CommitMark
    #: The highest LSN that was, or may have been, confirmed to the server.
    confirmed: Lsn | None
    #: The entries of the publication that this stream has added.
    added: set[int]
    #: The position at which the slot was created, as text.
    slot_created: str | None
    #: The number of the last reset.
    reset_number: int


class StateStore:
    """The state file of one stream; thread-safe.

    Its methods wait for other processes that use the file, so on an event loop they are called by
    `stored()`; only `post()` returns immediately.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        #: Writes that belong to the next transaction.
        self._posted: deque[Callable[[], object]] = deque()
        #: How often `post()` was called.
        self.writes = 0
        #: Whether a thread was started that will store what was posted.
        self._due = False
        try:
            self._database, self._identity = self._open()
        except (sqlite3.Error, OSError) as error:
            raise ConfigurationError(
                f"the state of the stream cannot be stored in {path}: {error}. Set state_dir to a "
                "writable directory. Move a damaged file away: consumers that are attached at the "
                "start then continue at the slot's position"
            ) from error

    def _open(self) -> tuple[sqlite3.Connection, Identity]:
        """Open the file, which is created if there is none; return which file it is, too."""
        identity = _make_private(self.path)
        database = sqlite3.connect(
            self.path, timeout=PATIENCE, check_same_thread=False, isolation_level=None
        )
        try:
            # Not "wal": instances that take turns may share the file on a network volume.
            database.execute("pragma journal_mode = truncate")
            database.execute("pragma synchronous = full")
            database.executescript(_LAYOUT)
            _add_reset_number(database)
        except sqlite3.Error:
            database.close()
            raise
        return database, identity

    def _reopen(self) -> None:
        """Open the file anew if it was deleted or replaced.

        A deleted file can still be read: what it has is copied into the new one.
        """
        with self._used():
            with suppress(OSError):
                if self._identity == _identity(self.path.stat()):
                    return
            kept: dict[str, list[tuple[object, ...]]] = {}
            with suppress(sqlite3.Error):  # without it, attached consumers get a `Reset`
                kept = {
                    table: self._database.execute(f"select * from {table}").fetchall()
                    for table in _TABLES
                }
            database, identity = self._open()
            try:
                database.execute("begin immediate")
                used = database.execute("select 1 from facts where name = 'history'").fetchone()
                for table, rows in () if used else kept.items():
                    insert = f"insert or ignore into {table} values ({_TABLES[table]})"
                    database.executemany(insert, rows)
                database.execute("commit")
            except BaseException:
                database.close()
                raise
            self._database.close()
            self._database, self._identity = database, identity
            log.warning("the state file %s was deleted or replaced: opened it again", self.path)

    def history(self) -> History | None:
        """Return the database and timeline that the stored positions belong to."""
        text = self.fact("history")
        if text is None:
            return None
        system_id, _, timeline_id = text.partition("/")
        return History(system_id, int(timeline_id))

    def confirmed(self) -> Lsn | None:
        """Return the highest LSN that was, or may have been, confirmed to the server."""
        text = self.fact("confirmed")
        return None if text is None else Lsn.parse(text)

    def last(self) -> CommitMark:
        """Return the last received commit; `NO_COMMIT` if unknown."""
        text = self.fact("last")
        return NO_COMMIT if text is None else CommitMark.parse(text)

    def load(self) -> StoredState:
        """Return everything, of the file that is there now."""
        self._reopen()
        last, confirmed = self.last(), self.confirmed()
        with self._reading():
            return StoredState(
                self._consumers(),
                self._resets(),
                last,
                confirmed,
                self._added(),
                self._value(SLOT_CREATED),
                int(self._value("reset_number") or 0),
            )

    # -- writes without waiting ----------------------------------------------------------------

    def post(self, write: Callable[..., object], *args: Any) -> None:
        """Let a write without a transaction of its own (`put_…`) be part of the next one.

        On an event loop, the next transaction begins at once, in a thread. If it fails, the write
        stays for the one after it: no position is confirmed to the server before it is stored. A
        write whose values cannot be stored is logged and left out.
        """
        self._posted.append(partial(write, *args))
        self.writes += 1
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            if not self._due:
                self._due = True
                stored(self.flush).add_done_callback(self._flushed)

    def _flushed(self, flush: asyncio.Future[None]) -> None:
        if not flush.cancelled() and (error := flush.exception()) is not None:
            self._due = False
            log.warning("%s; it is stored before the next position", error)

    def flush(self) -> None:
        """Store what was posted."""
        if self._posted:
            with self._transaction():
                pass

    def put_new(self, name: str, acknowledged: int | None) -> None:
        """Add a consumer, unless another process has added it."""
        at = None if acknowledged is None else str(Lsn(acknowledged))
        self._database.execute(
            "insert or ignore into consumers (name, acknowledged) values (?, ?)", (name, at)
        )

    def put_start(self, name: str, start: int) -> None:
        """Add a consumer without a position, or move its position back to this LSN."""
        saved = self._consumers().get(name)
        kept = None if saved is None else saved.acknowledged
        self.put(name, None if kept is None else min(kept, start))

    def put(self, name: str, acknowledged: int | None) -> None:
        """Add a consumer, or set its position."""
        at = None if acknowledged is None else str(Lsn(acknowledged))
        self._database.execute(
            "insert into consumers (name, acknowledged) values (?, ?) "
            "on conflict (name) do update set acknowledged = excluded.acknowledged",
            (name, at),
        )

    def put_reset(self, reset: Reset, name: str | None = None) -> None:
        """Reset all consumers, or one, with this reset."""
        number = max(reset.number, int(self._value("reset_number") or 0))
        self.put_fact("reset_number", str(number))
        if name is None:
            self._database.execute("delete from facts where name in ('confirmed', 'last')")
            self._database.execute("delete from followed")
            self.put_fact("resets", f"{self._resets().times + 1} {reset.reason}")
        self._database.execute(
            "update consumers set acknowledged = null, delivered = null, "
            "reset = ?, reset_number = ? where name = coalesce(?, name)",
            (*reset, name),
        )

    def put_fact(self, name: str, value: str) -> None:
        """Store a value under a name."""
        self._database.execute(
            "insert into facts values (?, ?) "
            "on conflict (name) do update set value = excluded.value",
            (name, value),
        )

    def put_dropped(self, name: str) -> None:
        """Remove a consumer, and the state of its copy."""
        self._database.execute("delete from consumers where name = ?", (name,))
        self._database.execute("delete from followed where consumer = ?", (name,))
        self._database.execute("delete from facts where name = ?", (_COPY + name,))

    # -- transactions --------------------------------------------------------------------------

    def save(
        self,
        confirmed: Lsn,
        acknowledged: Mapping[str, int],
        delivered: Mapping[str, int] = NOTHING,
        *,
        last: CommitMark = NO_COMMIT,
        times_reset: int = 0,
    ) -> bool:
        """Store all positions, before they are confirmed to the server.

        Positions only increase. Nothing is stored, and False returned, if the caller does not know
        of the last reset, which another process may have made.
        """
        with self._transaction():
            if self._resets().times != times_reset:
                return False
            before = self._value("confirmed")
            if before is None or confirmed > Lsn.parse(before):
                self.put_fact("confirmed", str(confirmed))
            before = self._value("last")
            if last != NO_COMMIT and (before is None or last > CommitMark.parse(before)):
                self.put_fact("last", str(last))
            known = self._consumers()
            self._database.executemany(
                "update consumers set acknowledged = ?, delivered = ? where name = ?",
                [
                    (str(Lsn(at)), str(Lsn(delivered.get(name, 0))), name)
                    for name, at in acknowledged.items()
                    if name in known and at > (known[name].acknowledged or -1)
                ],
            )
        return True

    def reset(self, reason: str, name: str | None = None) -> Reset:
        """Reset all consumers, or one: their positions are removed, and the reset stored."""
        with self._transaction():
            reset = Reset(reason, int(self._value("reset_number") or 0) + 1)
            self.put_reset(reset, name)
        return reset

    def reset_handled(self, name: str, number: int) -> None:
        """Record that a consumer has handled the reset with this number."""
        with self._transaction():
            self._database.execute(
                "update consumers set reset = null where name = ? and reset_number = ?",
                (name, number),
            )

    def follow(self, followed: Mapping[str, str]) -> None:
        """Store which tables consumers follow."""
        with self._transaction():
            self._database.executemany(
                "insert or replace into followed values (?, ?)", followed.items()
            )

    def set_added(self, entries: Collection[int]) -> None:
        """Store the entries of the publication that this stream has added."""
        with self._transaction():
            self.put_fact("added", json.dumps(sorted(entries)))

    def give_up(self, reason: str) -> None:
        """Record that the slot was given up: with the next one, all consumers are reset."""
        with self._transaction():
            self.put_fact(GIVEN_UP, reason)

    def given_up(self) -> str | None:
        """Return why the slot was given up; None if it was not, or the reset is complete."""
        return self.fact(GIVEN_UP)

    def set_history(self, history: History, confirmed: Lsn | None = None) -> None:
        """Store the history that the positions belong to: the last step of a reset.

        :param confirmed: the position of a slot that is new here; if it is further later, another
            program has moved the slot.
        """
        with self._transaction():
            self.put_fact("history", str(history))
            self._database.execute("delete from facts where name = 'given_up'")
            if confirmed is not None and self._value("confirmed") is None:
                self.put_fact("confirmed", str(confirmed))

    def fact(self, name: str) -> str | None:
        """Return the value under a name; None if there is none."""
        with self._reading():
            return self._value(name)

    def copy(self, consumer: str) -> str | None:
        """Return the state of a consumer's copy; None if there is none."""
        return self.fact(_COPY + consumer)

    def save_copy(self, consumer: str, state: str) -> None:
        """Store the state of a consumer's copy, unless the consumer was dropped."""
        with self._transaction():
            if consumer in self._consumers():
                self.put_fact(_COPY + consumer, state)

    def close(self) -> None:
        """Close the file."""
        try:
            self.flush()
        except StateError as error:
            log.warning("%s", error)
        with self._lock:
            self._database.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Hold the lock; raise an error of the file as a `StateError` that names it."""
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise StateError(self._advice(error)) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read what was stored and posted."""
        self.flush()
        with self._used():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a write transaction, after the posted writes and with them."""
        with self._used():
            self._due = False
            posted = list(self._posted)
            try:
                self._database.execute("begin immediate")
                for write in posted:
                    self._try(write)
                yield
                self._database.execute("commit")
                for _ in posted:
                    self._posted.popleft()
            except BaseException:
                # A failed commit leaves the transaction open; a full disk may have ended it.
                with suppress(sqlite3.Error):
                    self._database.execute("rollback")
                raise

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (ValueError, TypeError, OverflowError) as error:  # not of the file, but of a value
            log.error("a write to the state file %s is lost: %s", self.path, describe(error))

    def _advice(self, error: sqlite3.Error | OSError) -> str:
        otherwise = sqlite3.SQLITE_CANTOPEN if isinstance(error, OSError) else 0
        code = getattr(error, "sqlite_errorcode", otherwise)
        match code & 0xFF:
            case sqlite3.SQLITE_READONLY if code == sqlite3.SQLITE_READONLY_DBMOVED:
                return (
                    f"the state file {self.path} was deleted or replaced: it is opened again when "
                    "the stream starts again"
                )
            case sqlite3.SQLITE_BUSY:
                return (
                    f"another process has had the state file {self.path} locked for more than "
                    f"{PATIENCE:g} s: find that process (a backup? a shell with an open "
                    "transaction?), and end it"
                )
            case sqlite3.SQLITE_FULL:
                return f"the disk of the state file {self.path} is full: free disk space there"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN:
                return (
                    f"the state file {self.path} cannot be used: {error}; make {self.path.parent} "
                    "a directory that is writable"
                )
        return f"the state file {self.path} cannot be used: {error}"

    def _consumers(self) -> dict[str, Saved]:
        rows = self._database.execute(
            "select name, acknowledged, reset, reset_number, coalesce(delivered, '0/0'), tables "
            "from consumers left join followed on consumer = name"
        )
        return {
            name: Saved(
                None if at is None else Lsn.parse(at),
                None if reason is None else Reset(reason, number),
                Lsn.parse(delivered),
                tables,
            )
            for name, at, reason, number, delivered, tables in rows
        }

    def _added(self) -> set[int]:
        return set(json.loads(self._value("added") or "[]"))

    def _resets(self) -> Resets:
        times, _, reason = (self._value("resets") or "0 ").partition(" ")
        return Resets(int(times), reason)

    def _value(self, name: str) -> str | None:
        found = self._database.execute("select value from facts where name = ?", (name,))
        row = found.fetchone()
        return None if row is None else str(row[0])


def _make_private(path: Path) -> Identity:
    """Create the file with permissions for this user only; SQLite would make it readable to all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        return _identity(os.fstat(file))
    finally:
        os.close(file)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _add_reset_number(database: sqlite3.Connection) -> None:
    """Add the column to a file that was created without it."""
    try:
        database.execute("alter table consumers add column reset_number integer not null default 0")
    except sqlite3.OperationalError as error:
        if "duplicate column" not in str(error):
            raise
