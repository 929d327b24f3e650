"""A consumer in a separate process, so that it can be killed at any moment.

`python consumer_program.py CONFIG` follows a stream until it is killed. CONFIG is JSON: `url`,
`stream_id`, `state_dir`, `kind` (a keeper below), `path` (the file of its effects) and `tables`;
with `dies`, it kills itself `before` or `after` the call of a named function.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import moored.postgres.manage._stack as _stack
import moored.postgres.server._admin as _admin
from moored.postgres import UNCHANGED, Change, Emitted, Postgres, Reset, Transaction
from moored.postgres import Truncate as _Truncate
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._integrity import Integrity
from moored.postgres.consume._store import StateStore

__all__ = ["LEDGER", "checksum", "line"]

#: The table with one row for each transaction of the writers: its place in the order of commits,
#: and what its other changes must add up to.
LEDGER = "ledger"
#: Many faults follow each other within seconds: who waits longer between tries sees few of them.
BACKOFF = (0.05, 0.5)
#: It rests now and then: what has come meanwhile is not done, whoever is killed before it is.
RESTS_EVERY = 50
REST = 0.1
_PR_SET_PDEATHSIG = 1


def line(kind: str, table: str, row: dict[str, Any]) -> str:
    """Return the text of a change for the checksum.

    With `kept`, an update did not change the body, which the server may not send then.
    """
    if kind == "delete":
        return f"delete {table} {row['id']}"
    body = "=" if row["kept"] else row["body"]
    return f"{kind} {table} {row['id']} {row['number']} {body}"


def checksum(lines: Iterable[str]) -> str:
    """What the changes of a transaction add up to, in their order."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class Keeper(Protocol):
    """Makes the effect of a transaction durable before it is acknowledged."""

    @property
    def position(self) -> str | None: ...

    def keep(self, txn: Transaction) -> None: ...

    def reset(self, reason: str) -> None: ...


def seen(txn: Transaction) -> tuple[int, str, str]:
    """A transaction's number, the checksum in its ledger row, and that of its changes."""
    named: dict[str, Any] = {}
    lines = []
    for change in txn:
        row = change.new or change.old
        assert isinstance(change, Change), change
        assert row is not None, change
        if change.table == LEDGER:
            named = row
        else:
            lines.append(line(change.kind, change.table, row))
    return named["place"], named["checksum"], checksum(lines)


class Exact:
    """Maintains a copy of the tables, the order of transactions and the position, atomically."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(
            "pragma journal_mode = wal; pragma synchronous = normal;"
            "create table if not exists applied (at integer primary key autoincrement, "
            "  place int, named text, found text);"
            "create table if not exists rows (tab text, id int, number int, body text, "
            "  primary key (tab, id)) without rowid;"
            "create table if not exists position (one int primary key, value text);"
            "create table if not exists resets (reason text);"
        )
        row = self._database.execute("select value from position").fetchone()
        self.position = None if row is None else str(row[0])

    def keep(self, txn: Transaction) -> None:
        do = self._database.execute
        do("begin immediate")
        for change in txn:
            self._apply(change)
        do("insert into applied (place, named, found) values (?, ?, ?)", seen(txn))
        do("insert or replace into position values (1, ?)", (str(txn.position),))
        do("commit")

    def _apply(self, change: Change | _Truncate | Emitted) -> None:
        do, new, table = self._database.execute, change.new, change.table
        if table == LEDGER:
            return
        if new is None:
            assert change.old is not None
            done = do("delete from rows where tab = ? and id = ?", (table, change.old["id"]))
        elif change.kind == "insert":
            values = (table, new["id"], new["number"], new["body"])
            done = do("insert into rows values (?, ?, ?, ?)", values)
        else:
            body = None if new["body"] is UNCHANGED else new["body"]
            done = do(
                "update rows set number = ?, body = coalesce(?, body) where tab = ? and id = ?",
                (new["number"], body, table, new["id"]),
            )
        assert done.rowcount == 1, change

    def reset(self, reason: str) -> None:
        self._database.execute("insert into resets values (?)", (reason,))


class Plain:
    """Appends a line to a file, and has it written to the disk."""

    position = None

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def keep(self, txn: Transaction) -> None:
        self._write(" ".join(map(str, seen(txn))))

    def reset(self, reason: str) -> None:
        self._write(f"reset {reason}")

    def _write(self, text: str) -> None:
        os.write(self._file, f"{text}\n".encode())
        os.fsync(self._file)


class Count:
    """Counts the changes of each transaction, and reports its peak memory."""

    position = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._before = _peak()

    def keep(self, txn: Transaction) -> None:
        total = sum(change.new is not None for change in txn)
        told = {"changes": total, "grown_mb": _peak() - self._before}
        with open(self._path, "a") as file:
            file.write(json.dumps(told) + "\n")

    def reset(self, reason: str) -> None:
        raise RuntimeError(reason)


class Ids:
    """Appends the ids of the rows of each transaction."""

    position = None

    def __init__(self, path: str) -> None:
        self._plain = Plain(path)

    def keep(self, txn: Transaction) -> None:
        self._plain._write(" ".join(str(change.new["id"]) for change in txn if change.new))

    def reset(self, reason: str) -> None:
        self._plain.reset(reason)


KEEPERS: dict[str, Callable[[str], Keeper]] = {
    "exact": Exact,
    "plain": Plain,
    "count": Count,
    "ids": Ids,
}


#: Where it can be killed, on its way through a reset.
PLACES: dict[str, tuple[object, str]] = {
    "check": (Integrity, "check"),
    "drop_slot": (_admin, "drop_slot"),
    "store.reset": (StateStore, "reset"),
    "hub.reset": (Hub, "reset"),
    "set_history": (StateStore, "set_history"),
    "begin": (Hub, "begin"),
}


def die(when: str, place: str) -> None:
    """Kill this process before, within or after one of its calls."""
    owner, name = PLACES[place]
    called = getattr(owner, name)

    def kill(*ignored: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dies(*values: Any, **options: Any) -> Any:
        if when == "before":
            kill()
        if when == "within":  # the second change of its transaction is made, the third is not
            values[0]._database.set_trace_callback(
                lambda statement: kill() if statement.startswith("update consumers") else None
            )
        result = called(*values, **options)
        if asyncio.iscoroutine(result):
            return _then(result, kill)
        kill()
        return result

    setattr(owner, name, dies)


async def _then(work: Coroutine[Any, Any, Any], kill: Callable[[], None]) -> None:
    await work
    kill()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def main(config: dict[str, Any]) -> None:
    """Follow the stream for ever."""
    keeper = KEEPERS[config["kind"]](config["path"])
    async with Postgres(
        config["url"],
        stream_id=config["stream_id"],
        state_dir=config["state_dir"],
        pool_size=2,
        connect_timeout=5.0,
    ) as pg:
        changes = pg.changes(config["kind"], tables=config["tables"], start=keeper.position)
        taken = 0
        async for item in changes:
            taken += 1
            if taken % RESTS_EVERY == 0:
                await asyncio.sleep(REST)
            if isinstance(item, Reset):
                keeper.reset(item.reason)
                continue
            keeper.keep(item)
            if config.get("acks", True):
                await item.ack()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _stack.BACKOFF = BACKOFF
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    config = json.loads(sys.argv[1])
    if "dies" in config:
        die(*config["dies"])
    asyncio.run(main(config))
