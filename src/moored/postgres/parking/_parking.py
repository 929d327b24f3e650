"""The table of parked items, for a consumer and for operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, LiteralString, NamedTuple, TypeVar, overload

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from moored.kernel import describe, in_thread, raise_if_cancelled

from .._errors import ConfigurationError, PostgresError
from ..consume import Attachment, Transaction
from ..outbox import Outbox, OutboxEvent, PsycopgPool
from ..server import CREATE_SCHEMA
from ._stored import Stored, StoredEvents, StoredTransactions

if TYPE_CHECKING:
    from .._postgres import Postgres

__all__ = [
    "ParkedItem",
    "Parking",
    "drop_parked",
    "list_parked",
    "parking_ddl",
    "parking_grants",
    "parking_refused",
    "retry_parked",
]

#: Items with more bytes are not parked: a value of PostgreSQL has 1 GB at most, and is in memory.
MOST_BYTES = 64 << 20
#: Characters of an error that are stored.
ERROR_LENGTH = 2000

T = TypeVar("T")

_DDL = f"""{CREATE_SCHEMA.format(schema="moored")}
create table if not exists moored.parked (
    id bigint generated always as identity primary key,
    source text not null,
    consumer text not null,
    position text not null,
    what text not null,
    error text not null,
    tries int not null,
    parked timestamptz not null default clock_timestamp(),
    retry timestamptz,
    content bytea not null,
    unique (source, consumer, position)
);
"""
_GRANTS = """
grant usage on schema moored to {role};
grant select, insert, update, delete on moored.parked to {role};
"""
# Without a right on the schema, to_regclass() raises.
_EXISTS = "select to_regclass('moored.parked') is not null"
_ALLOWED = """
select bool_and(has_table_privilege('moored.parked', each))
from unnest(array['select', 'insert', 'update', 'delete']) as each
"""
# Several processes may create the table at the same time.
_LOCK = "select pg_advisory_xact_lock(hashtextextended('moored.parked', 0))"
_COLUMNS = "id, source, consumer, position, what, error, tries, parked, retry is not null as retry"
_LIST = f"""
select {_COLUMNS} from moored.parked
where source = %s and consumer = %s order by id
"""
_LIST_ALL = f"select {_COLUMNS} from moored.parked order by id"
# An item is parked twice if the process was killed before it was acknowledged.
_PARK = """
insert into moored.parked (source, consumer, position, what, error, tries, content)
values (%s, %s, %s, %s, %s, %s, %b)
on conflict (source, consumer, position)
do update set error = excluded.error, tries = parked.tries + excluded.tries
"""
# If this process ends before it has handled the item, the request is lost, and the item is not.
_CLAIM = """
update moored.parked set retry = null
where id = (
    select id from moored.parked where source = %s and consumer = %s and retry is not null
    order by retry, id limit 1 for update skip locked
)
returning id, content
"""
_FAILED = "update moored.parked set error = %s, tries = tries + 1 where id = %s"
_DROP = "delete from moored.parked where id = any(%s)"
_RETRY = "update moored.parked set retry = clock_timestamp() where id = any(%s)"


class ParkedItem(NamedTuple):
    """An item that a consumer could not handle."""

    #: The number that `moored consumers retry` and `drop` take.
    id: int
    #: Where it is from: "stream default" or "outbox moored".
    source: str
    consumer: str
    #: Its position in the order of the source.
    position: str
    #: What it is, for people.
    what: str
    #: The last error.
    error: str
    #: How often the consumer's function has failed with it.
    tries: int
    parked: datetime
    #: Whether an operator has asked for a retry that has not begun.
    retry: bool

    def plain(self) -> dict[str, Any]:
        """Return it in types that JSON can represent."""
        return {**self._asdict(), "parked": self.parked.isoformat()}


class Parking(Generic[T]):
    """The parked items of one consumer, in the table `moored.parked` of its database.

    Park an item, and acknowledge it afterwards: then the consumer goes on with the next one.
    `Parking.of()` makes one.
    """

    def __init__(
        self, connections: PsycopgPool, source: str, consumer: str, stored: Stored[T]
    ) -> None:
        self._connections = connections
        self._key = source, consumer
        self._stored = stored

    @overload
    @staticmethod
    def of(source: Postgres, consumer: str) -> Parking[Transaction]: ...

    @overload
    @staticmethod
    def of(source: Outbox, consumer: str) -> Parking[OutboxEvent]: ...

    @staticmethod
    def of(source: Postgres | Outbox, consumer: str) -> Parking[Any]:
        """Return the parked items of a consumer of changes, or of an outbox with a table."""
        if isinstance(source, Outbox):
            return Parking(source._reader, f"outbox {source.schema}", consumer, StoredEvents())
        pg = source
        stored = StoredTransactions(lambda: Attachment(pg._hub, consumer), lambda: pg._stack.types)
        return Parking(pg, f"stream {pg.settings.stream_id}", consumer, stored)

    async def prepare(self) -> None:
        """Create the table if it is missing; raise `ConfigurationError` if that is not allowed.

        It must have succeeded before the first item is parked.
        """
        async with self._connection() as conn:
            if not await _value(conn, _EXISTS):
                async with conn.transaction():
                    await conn.execute(_LOCK)
                    await conn.execute(_DDL)
            if not await _value(conn, _ALLOWED):
                raise await parking_refused(conn, "a right on it is missing")

    async def items(self) -> list[ParkedItem]:
        """Return the parked items, the oldest first."""
        async with self._connection() as conn:
            return await _items(conn, _LIST, self._key)

    def position(self, item: T) -> str:
        """Return the `position` that an item has when it is parked."""
        return self._stored.position(item)

    async def park(self, item: T, error: BaseException, *, tries: int = 1) -> None:
        """Store an item with its error; acknowledge the item when this has returned.

        Raises `PostgresError` if the item is too large, or one of `follow()`: then it must not be
        acknowledged.
        """
        position, what = self._stored.position(item), self._stored.describe(item)
        if self._stored.size(item) > MOST_BYTES:
            raise PostgresError(f"{what} has more than {MOST_BYTES >> 20} MB: it cannot be parked")
        content = await in_thread(partial(self._stored.pack, item), name="moored parked item")
        values = position, what, _text(error), tries, content
        async with self._connection() as conn:
            await conn.execute(_PARK, (*self._key, *values))

    async def claim(self) -> tuple[int, T | Exception] | None:
        """Return the next item whose retry an operator has asked for, with its number.

        In place of an item that cannot be read, return the error.
        """
        async with self._connection() as conn:
            row = await (await conn.execute(_CLAIM, self._key)).fetchone()
            if row is None:
                return None
            id_, content = row
            try:
                return id_, await self._stored.unpack(bytes(content), conn)
            except psycopg.Error:
                raise
            except Exception as error:
                return id_, error

    async def failed(self, id_: int, error: BaseException) -> None:
        """Store the error of a retry."""
        async with self._connection() as conn:
            await conn.execute(_FAILED, (_text(error), id_))

    async def remove(self, id_: int) -> None:
        """Remove an item that was handled."""
        async with self._connection() as conn:
            await conn.execute(_DROP, ([id_],))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        try:
            async with self._connections.connection() as conn:
                try:
                    yield conn
                except psycopg.errors.InsufficientPrivilege as error:
                    raise await parking_refused(conn, describe(error)) from error
        except psycopg.Error as error:
            raise_if_cancelled(error)
            raise

    def __repr__(self) -> str:
        return f"<Parking of {self._key[1]!r} in {self._key[0]}>"


async def list_parked(conn: psycopg.AsyncConnection[Any]) -> list[ParkedItem]:
    """Return the parked items of all consumers; none if the table does not exist."""
    return await _items(conn, _LIST_ALL) if await _value(conn, _EXISTS) else []


async def retry_parked(conn: psycopg.AsyncConnection[Any], ids: Sequence[int]) -> None:
    """Ask the running consumers to handle these items."""
    await conn.execute(_RETRY, (list(ids),))


async def drop_parked(conn: psycopg.AsyncConnection[Any], ids: Sequence[int]) -> None:
    """Delete these items."""
    await conn.execute(_DROP, (list(ids),))


async def parking_refused(conn: psycopg.AsyncConnection[Any], why: str) -> ConfigurationError:
    """Return the error for a role without rights on the table; roll its transaction back."""
    await conn.rollback()
    role = await _value(conn, "select current_user")
    return ConfigurationError(
        f"the role {role} has no right to use the table of parked items, moored.parked ({why}): "
        f"run `moored consumers install --grant {role}` as an owner of the database"
    )


def parking_ddl() -> str:
    """Return the statements that create the table of parked items."""
    return _DDL.lstrip()


def parking_grants(role: str) -> str:
    """Return the statements that let a role park items, and retry and drop them."""
    return sql.SQL(_GRANTS).format(role=sql.Identifier(role)).as_string(None).lstrip()


async def _value(conn: psycopg.AsyncConnection[Any], query: LiteralString) -> Any:
    row = await (await conn.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def _items(
    conn: psycopg.AsyncConnection[Any], query: str, values: Sequence[Any] = ()
) -> list[ParkedItem]:
    async with conn.cursor(row_factory=class_row(ParkedItem)) as cursor:
        await cursor.execute(query.encode(), values)
        return await cursor.fetchall()


def _text(error: BaseException) -> str:
    """Return an error as text that a column can hold."""
    return describe(error).replace("\0", "\\0")[:ERROR_LENGTH]
