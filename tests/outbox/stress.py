"""Publishers of every kind, backends that are terminated, and readers side by side.

Two of the readers are wrong, and must miss events: one continues after the highest id, the other
orders by (xid, id) behind the holders of the outbox's lock.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from moored.postgres.outbox import Outbox

__all__ = ["Found", "stress_run"]

PUBLISHERS = 8
#: Seconds that a step of a transaction takes at most, and that the whole run may take.
NAP, LIMIT = 0.02, 240.0
APPLICATION = "stress"
SETUP = (
    # For the wrong reader: the outbox itself has none.
    "alter table moored.outbox add tx xid8 not null default pg_current_xact_id()",
    "create table captured (channel text, payload text)",
    "create table other (id int)",
)
INTO = "insert into {} (channel, payload)"


@dataclass
class Found:
    """What each reader got, by its name, in its order; and what is in the table at the end."""

    stored: list[str] = field(default_factory=list)
    read: dict[str, list[str]] = field(default_factory=dict)
    terminated: int = 0
    crashes: int = 0

    def missed(self, reader: str) -> int:
        """How many events a reader did not get."""
        return len(set(self.stored) - set(self.read[reader]))


async def stress_run(url: str, events: int, seed: int, *, crash_every: float = 0.0) -> Found:
    """Publish until there are so many events, and the two wrong readers have missed some."""
    found = Found()
    url = psycopg.conninfo.make_conninfo(url, application_name=APPLICATION)
    stop, end = asyncio.Event(), asyncio.Event()
    outbox = Outbox(url, retain=None)
    async with outbox:
        await outbox.install(wake="poll")
        for statement in SETUP:
            await outbox._reader.run(psycopg.sql.SQL(statement))
        await outbox.capture("captured")
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            for name in ("steady", "other"):
                tasks.create_task(_read(outbox, url, name, found, end))
            tasks.create_task(_read(None, url, "restarted", found, end))
            tasks.create_task(_wrong(url, "id", "o.id > %s", found, end))
            xid = "(o.tx, o.id) > (%s::text::xid8, %s)"
            tasks.create_task(_wrong(url, "xid", xid, found, end))
            publishers = [
                tasks.create_task(_publish(url, n, stop, random.Random(seed + n)))
                for n in range(PUBLISHERS)
            ]
            tasks.create_task(_terminate(url, found, random.Random(seed), end))
            if crash_every:
                tasks.create_task(_crash(url, found, crash_every, end))
            while len(found.stored) < events or not (found.missed("id") and found.missed("xid")):
                await asyncio.sleep(0.2)
                found.stored, _ = await _stored(url)
            stop.set()
            await asyncio.gather(*publishers)
            left = 1
            while left or any(found.missed(name) for name in ("steady", "other", "restarted")):
                found.stored, left = await _stored(url)
                await asyncio.sleep(0.05)
            end.set()
    return found


async def _publish(url: str, number: int, stop: asyncio.Event, chance: random.Random) -> None:
    count = 0

    def nap() -> Any:
        return asyncio.sleep(chance.uniform(0, NAP))

    def payload() -> str:
        nonlocal count
        count += 1
        return f"{number}/{count}"

    while not stop.is_set():
        with suppress(psycopg.Error):
            async with await psycopg.AsyncConnection.connect(url) as conn:
                while not stop.is_set():
                    await _transaction(conn, chance, payload, nap)


async def _transaction(
    conn: psycopg.AsyncConnection[Any],
    chance: random.Random,
    payload: Callable[[], str],
    nap: Callable[[], Any],
) -> None:
    if chance.random() < 0.4:
        await conn.execute("insert into other values (1)")  # an xid, before it publishes
        await nap()
    for _ in range(chance.randint(1, 2)):
        await _insert(conn, chance, payload)
        await nap()
    if chance.random() < 0.3:
        await conn.execute("savepoint s")
        await _insert(conn, chance, payload)
        await nap()
        undone = chance.random() < 0.6
        await conn.execute("rollback to s" if undone else "release s")
        await nap()
    end = chance.random()
    if end < 0.2:
        await conn.rollback()
    elif end < 0.35:
        name = f"stress {payload()}"
        await conn.execute(f"prepare transaction '{name}'".encode())
        await nap()
        await conn.rollback()
        await conn.set_autocommit(True)
        await conn.execute(f"commit prepared '{name}'".encode())
        await conn.set_autocommit(False)
    else:
        await conn.commit()


async def _insert(
    conn: psycopg.AsyncConnection[Any], chance: random.Random, payload: Callable[[], str]
) -> None:
    into = INTO.format("moored.outbox")
    match chance.randrange(6):
        case 0:
            await conn.execute(f"{into} values ('x', %s)".encode(), [payload()])
        case 1:
            rows = [payload(), payload()]
            await conn.execute(f"{into} select 'x', unnest(%s)".encode(), [rows])
        case 2:
            async with conn.cursor().copy(
                "copy moored.outbox (channel, payload) from stdin"
            ) as copy:
                await copy.write_row(("x", payload()))
        case 3:
            query = f"{INTO.format('captured')} values ('x', %s)"
            await conn.execute(query.encode(), [payload()])
        case 4:
            query = f"{into} values ('x', %s)"
            await conn.execute(query.encode(), [payload()], prepare=True)
        case _:
            await conn.execute("select moored.outbox_publish('x', %s)", [payload()])


async def _read(
    outbox: Outbox | None, url: str, name: str, found: Found, end: asyncio.Event
) -> None:
    """A right reader; without an outbox, one that starts anew every 20 pages."""
    got = found.read[name] = []
    cursor: str | None = None
    while not end.is_set():
        mine = outbox or Outbox(url, retain=None)
        if outbox is None:
            await mine.open()
        with suppress(psycopg.Error, OSError):
            for _ in range(20):
                batch = await mine.read(cursor)
                assert batch.reset is None, batch.reset
                got += [event.payload for event in batch.events]
                cursor = batch.cursor
                await asyncio.sleep(0.005)
        if outbox is None:
            await mine.close()
        await asyncio.sleep(0.005)


async def _wrong(url: str, name: str, after: str, found: Found, end: asyncio.Event) -> None:
    got = found.read[name] = []
    place: list[Any] = ["0", 0]
    order = "o.id" if name == "id" else "o.tx, o.id"
    final = "" if name == "id" else "and o.id <= %s"
    query = (
        f"select o.tx::text, o.id, o.payload from moored.outbox o where {after} {final} "
        f"order by {order}"
    )
    outbox = Outbox(url, retain=None)
    async with outbox:
        while not end.is_set():
            with suppress(psycopg.Error, OSError):
                look = await outbox._reader.looks.from_now()
                async with await psycopg.AsyncConnection.connect(url) as conn:
                    values = place[1:] if name == "id" else [*place, look.final]
                    rows = await (await conn.execute(query.encode(), values)).fetchall()
                got += [row[2] for row in rows]
                if rows:
                    place = list(rows[-1][:2])
            await asyncio.sleep(0.005)


async def _stored(url: str) -> tuple[list[str], int]:
    """What is in the table, and how many prepared transactions were left; some are committed."""
    while True:
        with suppress(psycopg.Error):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                left = await (await conn.execute("select gid from pg_prepared_xacts")).fetchall()
                query = "select payload from moored.outbox order by id"
                rows = await (await conn.execute(query)).fetchall()
                for (name,) in left if random.random() < 0.3 else ():
                    with suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectInUse):
                        await conn.execute(f"commit prepared '{name}'".encode())
                return [payload for (payload,) in rows], len(left)
        await asyncio.sleep(0.1)


async def _terminate(url: str, found: Found, chance: random.Random, end: asyncio.Event) -> None:
    query = (
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = %s and pid <> pg_backend_pid() order by random() limit 1"
    )
    while not end.is_set():
        await asyncio.sleep(chance.uniform(0.1, 0.4))
        with suppress(psycopg.Error):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                await conn.execute(query.encode(), [APPLICATION])
                found.terminated += 1


async def _crash(url: str, found: Found, every: float, end: asyncio.Event) -> None:
    """Kill a backend, so that the server recovers from a crash."""
    while not end.is_set():
        await asyncio.sleep(every)
        with suppress(psycopg.Error):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                os.kill(conn.info.backend_pid, signal.SIGKILL)
                found.crashes += 1
                await conn.execute("select pg_sleep(10)")
