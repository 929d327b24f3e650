"""Nothing is lost while writers run at full speed and processes and connections are killed.

The expected result is in the database itself. Each transaction of a writer ends by incrementing a
counter in one row, which stays locked until the commit, and by writing that number and the checksum
of its changes into the table `ledger`. So the numbers are exactly in commit order: the next one can
only be drawn after the commit record of the last one was written. A writer whose commit was
interrupted looks its number up in `ledger` after it has reconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from moored.embedded import EmbeddedPostgres
from moored.postgres import Postgres
from moored.postgres.manage import _stack
from moored.testing import FaultProxy, base_seed, scaled

from .consumer_program import LEDGER, checksum, line
from .mirror import Mirror, mirroring
from .server import ConsumerProcess, connected, one, published, through, until

pytestmark = pytest.mark.timeout(400)

TABLES = ("accounts", "items", "notes")
WRITERS = 3
#: Seconds between two transactions of a writer; at full scale, none.
PAUSE = 0.0 if scaled(10) >= 10 else 0.02
#: How long everybody may take to come back after the last fault, and to read the rest.
CATCH_UP = 90.0

Row = dict[str, Any]


async def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    seconds, number_of_faults = scaled(60, least=4), scaled(30, least=7)
    async with EmbeddedPostgres() as server, FaultProxy("127.0.0.1", server.port) as proxy:
        await create_tables(server.url)
        url = through(server.url, proxy.port)
        tables = (*TABLES, LEDGER)
        consumers = [ConsumerProcess(url, k, tmp_path, tables=tables) for k in ("exact", "plain")]
        faults = Faults(server, proxy, consumers, random.Random(base_seed()))
        with consumers[0] as exact, consumers[1] as plain:
            for consumer in consumers:
                await published(server.url, consumer.kind, *tables)
            async with writing(server.url):
                await faults.run(number_of_faults, seconds)
            async with connected(server.url) as conn:
                truth = await (
                    await conn.execute("select place, checksum from ledger order by place")
                ).fetchall()
                rows = await contents(conn)
            assert len(truth) > 5 * seconds
            await until(lambda: caught_up(consumers, len(truth)), CATCH_UP)
            assert not exact.ended
            assert not plain.ended
        assert sum(faults.done.values()) == number_of_faults
        applied, copied = kept_by(exact)
        assert applied == [(place, named, named) for place, named in truth]
        assert copied == rows
        assert first_deliveries(plain) == [f"{place} {named} {named}" for place, named in truth]


async def test_nothing_is_lost_whatever_is_done_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror copies the table at each `Reset`, and believes every change in between."""
    monkeypatch.setattr(_stack, "BACKOFF", (0.05, 0.5))
    rng = random.Random(base_seed())
    async with EmbeddedPostgres() as server, connected(server.url) as conn:
        await conn.execute(f"create table orders {COLUMNS}")
        async with (
            Postgres(
                server.url, state_dir=tmp_path, pool_size=2, stream_id="m", check_every=0.2
            ) as pg,
            mirroring(pg, server.url) as mirror,
        ):
            await pg.wait_until_published("orders", timeout=CATCH_UP)
            over = asyncio.Event()
            writer = asyncio.create_task(write_rows(server.url, over))
            number = scaled(40, least=len(TABLE_FAULTS))
            for fault in itertools.islice(itertools.cycle(shuffled(TABLE_FAULTS, rng)), number):
                await asyncio.sleep(rng.uniform(0.0, 0.4))
                resets = len(mirror.resets)
                try:
                    for statement in fault:
                        await conn.execute(statement.encode())
                    if rng.random() < 0.5:
                        await conn.execute(
                            "select pg_terminate_backend(pid) from pg_stat_activity "
                            "where backend_type = 'walsender'"
                        )
                except psycopg.errors.UndefinedObject:
                    continue  # it was taken out, and is not put back yet
                await until(partial(was_told, mirror, resets), CATCH_UP)
            over.set()
            assert await writer > 50
            await until(mirror.agrees, CATCH_UP)
            assert len(mirror.resets) >= len(TABLE_FAULTS)


COLUMNS = "(id bigint primary key, name text)"
TABLE_FAULTS = (
    ("begin; drop table orders; create table orders " + COLUMNS + "; commit",),
    ("drop table orders", "create table orders " + COLUMNS),
    (
        "drop table if exists orders_renamed",
        "alter table orders rename to orders_renamed",
        "create table orders " + COLUMNS,
    ),
    (
        "drop table if exists orders_old; drop table if exists orders_new; "
        "create table orders_new (like orders including all); "
        "insert into orders_new select * from orders limit 5",
        "begin; alter table orders rename to orders_old; "
        "alter table orders_new rename to orders; commit",
    ),
    ("alter publication moored_publication_m drop table orders",),
    ("alter publication moored_publication_m set (publish = 'insert')",),
    ("drop publication moored_publication_m",),
    (
        "do $$ begin if (select atttypid = 'text'::regtype from pg_attribute "
        "where attrelid = 'orders'::regclass and attname = 'name') "
        "then alter table orders alter name type varchar using name || '!'; "
        "else alter table orders alter name type text using name || '?'; end if; end $$",
    ),
)


def shuffled(faults: tuple[Any, ...], rng: random.Random) -> list[Any]:
    return rng.sample(faults, len(faults))


async def was_told(mirror: Mirror, before: int) -> bool:
    return len(mirror.resets) > before


async def write_rows(url: str, over: asyncio.Event) -> int:
    """Insert, update and delete, whatever becomes of the table; return how many were committed."""
    done = 0
    async with connected(url) as conn:
        for number in itertools.count():
            if over.is_set():
                return done
            await asyncio.sleep(PAUSE / 4)
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                await conn.execute(
                    f"begin; insert into orders values ({number}, 'new'); "
                    f"update orders set name = 'changed' where id % 7 = {number % 7}; "
                    f"delete from orders where id = {number - 20}; commit".encode()
                )
                done += 1
                continue
            await conn.execute("rollback")
    return done


# -- what is true --------------------------------------------------------------------------------


async def create_tables(url: str) -> None:
    async with connected(url) as conn:
        for table in TABLES:
            await conn.execute(
                sql.SQL(
                    "create table {} (id bigint primary key, number int, kept bool, body text)"
                ).format(sql.Identifier(table))
            )
        await conn.execute("create table counter (one int primary key, place int)")
        await conn.execute("insert into counter values (1, 0)")
        await conn.execute(
            "create table ledger (writer int, number int, place int unique, checksum text, "
            "primary key (writer, number))"
        )


async def contents(conn: psycopg.AsyncConnection[Any]) -> set[tuple[str, int, int, str]]:
    """All rows of the tables, as the server has them."""
    found = set()
    for table in TABLES:
        query = sql.SQL("select id, number, body from {}").format(sql.Identifier(table))
        found |= {(table, *row) for row in await (await conn.execute(query)).fetchall()}
    return found


# -- the writers ---------------------------------------------------------------------------------


@asynccontextmanager
async def writing(url: str) -> AsyncIterator[None]:
    """Let the writers write; afterwards each has ended its last transaction."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(WRITERS):
            tasks.create_task(Writer(url, number).run(over))
        try:
            yield
        finally:
            over.set()


class Writer:
    """Writes random transactions to rows of its own, and knows which were committed."""

    def __init__(self, url: str, writer: int) -> None:
        self._url = url
        self._writer = writer
        self._random = random.Random(base_seed() + writer)
        self._fresh = itertools.count(writer * 1_000_000_000)
        self._rows: dict[str, dict[int, Row]] = {table: {} for table in TABLES}

    async def run(self, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            try:
                async with connected(self._url) as conn:
                    # What came to its end while the connection broke is in the ledger, or never.
                    number = await self._last(conn) + 1
                    while not over.is_set():
                        await self._write(conn, number)
                        number += 1
                        await asyncio.sleep(PAUSE)
            except psycopg.OperationalError:
                await asyncio.sleep(0.05)

    async def _last(self, conn: psycopg.AsyncConnection[Any]) -> int:
        last = await one(conn, "select max(number) from ledger where writer = %s", self._writer)
        for table in TABLES:
            query = sql.SQL("select id, number, kept, body from {} where id / 1000000000 = %s")
            async with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                await cursor.execute(query.format(sql.Identifier(table)), (self._writer,))
                self._rows[table] = {row["id"]: row for row in await cursor.fetchall()}
        return last or 0

    async def _write(self, conn: psycopg.AsyncConnection[Any], number: int) -> None:
        changes = [self._change() for _ in range(self._random.randint(1, 50))]
        total = checksum(line(*change) for change in changes)
        vain = self._in_vain() if self._random.random() < 0.2 else []
        statements = [
            "begin",
            *vain,
            *(statement(*change) for change in changes),
            "with next as (update counter set place = place + 1 returning place) "
            f"insert into ledger select {self._writer}, {number}, place, '{total}' from next",
            "commit",
        ]
        # All at once: the writers are there to keep the server busy, not to wait for it.
        await conn.execute("; ".join(statements).encode())

    def _in_vain(self) -> list[str]:
        """Roll back a part of the transaction, which must not be delivered."""
        insert = statement("insert", TABLES[0], self._new_row(next(self._fresh)))
        return ["savepoint vain", insert, "rollback to vain"]

    def _change(self) -> tuple[str, str, Row]:
        table = self._random.choice(TABLES)
        rows = self._rows[table]
        chance = self._random.random()
        if not rows or chance < 0.5:
            row = self._new_row(next(self._fresh))
            rows[row["id"]] = row
            return "insert", table, row
        chosen = self._random.choice(list(itertools.islice(rows, 100)))
        if chance < 0.7:
            return "delete", table, rows.pop(chosen)
        row = self._new_row(chosen)
        if chance < 0.85:
            row |= {"kept": True, "body": rows[chosen]["body"]}
        rows[chosen] = row
        return "update", table, row

    def _new_row(self, id: int) -> Row:  # noqa: A002 - it is the column's name
        # Some are so large that the server keeps them apart, and does not send them again.
        size = 3000 if self._random.random() < 0.03 else self._random.randint(0, 60)
        body = self._random.randbytes(size).hex()
        return {"id": id, "number": self._random.randint(0, 999), "kept": False, "body": body}


def statement(kind: str, table: str, row: Row) -> str:
    """A change as SQL; its texts are hexadecimal digits, so they need no care."""
    where = f"where id = {row['id']}"
    if kind == "delete":
        return f"delete from {table} {where}"
    if kind == "insert":
        values = f"{row['id']}, {row['number']}, {row['kept']}, '{row['body']}'"
        return f"insert into {table} values ({values})"
    body = "" if row["kept"] else f", body = '{row['body']}'"
    return f"update {table} set number = {row['number']}, kept = {row['kept']}{body} {where}"


# -- the faults ----------------------------------------------------------------------------------


class Faults:
    """A plan of faults, each kind as often as the others, in a random order."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        proxy: FaultProxy,
        consumers: list[ConsumerProcess],
        chance: random.Random,
    ) -> None:
        self._server = server
        self._proxy = proxy
        self._consumers = consumers
        self._random = chance
        self.done: Counter[str] = Counter()

    async def run(self, number: int, seconds: float) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = []
        moments = sorted(self._random.uniform(0.5, seconds) for _ in range(number))
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for moment in moments:
            if not kinds:
                kinds = [getattr(self, name) for name in self.KINDS]
                self._random.shuffle(kinds)
            await asyncio.sleep(max(0.0, begin + moment - loop.time()))
            fault = kinds.pop()
            await fault()
            self.done[fault.__name__] += 1
        await asyncio.sleep(max(0.0, begin + seconds - loop.time()))

    KINDS = (
        "kill_the_server",
        "terminate_backends",
        "reset_connections",
        "cut_in_the_middle",
        "stall",
        "black_hole",
        "kill_consumers",
    )

    async def kill_the_server(self) -> None:
        await self._server.kill()
        await self._server.start()

    async def terminate_backends(self) -> None:
        async with connected(self._server.url) as conn:
            await conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where pid <> pg_backend_pid() and backend_type in ('client backend', 'walsender') "
                "and (backend_type = 'walsender' or random() < 0.5)"
            )

    async def reset_connections(self) -> None:
        self._proxy.reset()

    async def cut_in_the_middle(self) -> None:
        self._proxy.cut_after(self._random.randint(1, 200_000), "down")
        await asyncio.sleep(self._random.uniform(0.1, 0.5))
        self._proxy.cut_after(None)

    async def stall(self) -> None:
        self._proxy.stall()
        await asyncio.sleep(self._random.uniform(0.1, 1.0))
        self._proxy.resume()

    async def black_hole(self) -> None:
        self._proxy.black_hole()
        await asyncio.sleep(self._random.uniform(0.1, 1.0))
        self._proxy.resume()

    async def kill_consumers(self) -> None:
        # After a pause much comes at once: they are killed with a part of it still to be done, at
        # a time when the server has just been told how far they are.
        async with connected(self._server.url) as conn:
            await until(lambda: one(conn, "select bool_and(active) from pg_replication_slots"))
        self._proxy.stall()
        await asyncio.sleep(1.0)
        self._proxy.resume()
        await asyncio.sleep(self._random.uniform(0.25, 0.45))
        for consumer in self._consumers:
            consumer.kill()
        for consumer in self._consumers:
            consumer.start()


# -- what was kept -------------------------------------------------------------------------------


async def caught_up(consumers: list[ConsumerProcess], last: int) -> bool:
    """Whether everybody has the transaction that was committed last."""
    for consumer in consumers:
        assert not consumer.ended, consumer.log.read_text()[-2000:]
    exact, plain = consumers
    applied, _ = kept_by(exact)
    lines = plain.lines()
    return bool(applied and applied[-1][0] == last and f"{last} " in "".join(lines[-1:]))


def kept_by(exact: ConsumerProcess) -> tuple[list[Any], set[Any]]:
    """The transactions in the order of their effects, and the rows that they left."""
    with sqlite3.connect(exact.path, timeout=10) as database:
        resets = database.execute("select reason from resets").fetchall()
        assert resets == []
        applied = database.execute("select place, named, found from applied order by at").fetchall()
        rows = set(database.execute("select tab, id, number, body from rows").fetchall())
    database.close()
    return applied, rows


def first_deliveries(plain: ConsumerProcess) -> list[str]:
    """Return the transactions without repeated deliveries."""
    return list(dict.fromkeys(plain.lines()))
