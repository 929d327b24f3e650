"""What must survive this process, in one small file: which history, who consumes, how far.

Every method is one transaction of SQLite, and durable when it returns.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ._errors import ConfigurationError
from ._lsn import Lsn
from ._position import History

__all__ = ["Resets", "Saved", "StateStore"]

NOTHING: Mapping[str, int] = MappingProxyType({})

_LAYOUT = """
create table if not exists facts (name text primary key, value text not null) without rowid;
create table if not exists consumers (
    name text primary key,
    acknowledged text,  -- null for one that begins anew
    delivered text,     -- the end of the last transaction of its own; null if that is not known
    reset text          -- why it must begin anew, until it was told
) without rowid;
"""


class Saved(NamedTuple):
    """A consumer, as it was saved."""

    acknowledged: Lsn | None
    #: Why it must begin anew; None once it was told.
    reset: str | None
    #: The end of the last transaction that it acknowledged.
    delivered: Lsn = Lsn(0)


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
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
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

    def resets(self) -> Resets:
        """How often everybody had to begin anew, and why the last time."""
        with self._lock:
            return self._resets()

    def consumers(self) -> dict[str, Saved]:
        """All that were ever here and were not dropped."""
        with self._lock:
            return self._consumers()

    def save(
        self,
        told: Lsn,
        acknowledged: Mapping[str, int],
        delivered: Mapping[str, int] = NOTHING,
        *,
        times_reset: int = 0,
    ) -> None:
        """How far everybody is, before the server is told.

        Nobody forgets what was told or acknowledged: the one of two that comes late changes
        nothing. That may be another process, which has not heard of a reset yet.
        """
        with self._lock, _Transaction(self._database):
            if self._resets().times != times_reset:
                return
            before = self._value("told")
            if before is None or told > Lsn.parse(before):
                self._set("told", str(told))
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
        with self._lock, _Transaction(self._database):
            self._database.execute(
                "insert into consumers (name, acknowledged) values (?, ?) "
                "on conflict (name) do update set acknowledged = excluded.acknowledged",
                (name, at),
            )

    def drop(self, name: str) -> None:
        """A consumer that does not come back."""
        with self._lock, _Transaction(self._database):
            self._database.execute("delete from consumers where name = ?", (name,))

    def reset(self, reason: str, name: str | None = None) -> None:
        """History is not what it was: all consumers (or this one) begin anew, and are told why."""
        with self._lock, _Transaction(self._database):
            if name is None:
                self._database.execute("delete from facts where name = 'told'")
                self._set("resets", f"{self._resets().times + 1} {reason}")
            self._database.execute(
                "update consumers set acknowledged = null, delivered = null, reset = ? "
                "where name = coalesce(?, name)",
                (reason, name),
            )

    def was_told(self, name: str, reason: str) -> None:
        """A consumer knows that it begins anew, for this reason."""
        with self._lock, _Transaction(self._database):
            self._database.execute(
                "update consumers set reset = null where name = ? and reset = ?", (name, reason)
            )

    def give_up(self, reason: str) -> None:
        """The slot cannot be read any more: whatever the next one is, everybody begins anew."""
        with self._lock, _Transaction(self._database):
            self._set("given_up", reason)

    def given_up(self) -> str | None:
        """Why the slot was given up; None if it was not, or if everybody was told."""
        return self._fact("given_up")

    def set_history(self, history: History, stands_at: Lsn | None = None) -> None:
        """Everything here belongs to this history from now on: the last step of a reset.

        A slot that is new to us is where it would be if it had been told so: whoever finds it
        elsewhere later knows that it was moved, or made anew.
        """
        with self._lock, _Transaction(self._database):
            self._set("history", str(history))
            self._database.execute("delete from facts where name = 'given_up'")
            if stands_at is not None and self._value("told") is None:
                self._set("told", str(stands_at))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _consumers(self) -> dict[str, Saved]:
        rows = self._database.execute(
            "select name, acknowledged, reset, coalesce(delivered, '0/0') from consumers"
        )
        return {
            name: Saved(None if at is None else Lsn.parse(at), reset, Lsn.parse(delivered))
            for name, at, reset, delivered in rows
        }

    def _resets(self) -> Resets:
        times, _, reason = (self._value("resets") or "0 ").partition(" ")
        return Resets(int(times), reason)

    def _fact(self, name: str) -> str | None:
        with self._lock:
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


class _Transaction:
    """One transaction, with the file's lock taken at its beginning."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._database.execute("commit" if kind is None else "rollback")
