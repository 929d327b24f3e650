"""Read a table in chunks, each in a transaction of its own with a snapshot of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.types.string import ByteaBinaryLoader

from moored.kernel import Backoff, WaitTimeout, describe, raise_if_cancelled

from .._errors import ConfigurationError, PostgresError
from .._lsn import Lsn
from .._position import HISTORY, History
from ..decode import Column, Relation, ReplicaIdentity, Row, Types
from ..server import _admin
from ._copy_out import BLOCK_BYTES, copy_blocks
from ._join import Chunk, Key, Sight
from ._source import (
    DISPLAY,
    MARKER,
    ColumnsChanged,
    KeyValues,
    SourceTable,
    describe_table,
    writers,
)

__all__ = ["Pieces", "TableReader", "TableView", "TransactionLost", "end_task"]

log = logging.getLogger("moored.postgres")

#: Rows of a chunk, by default: as Python values, and as bytes, which take less memory.
ROWS, BYTE_ROWS = 50_000, 150_000
#: Rows that are converted at once, before other tasks run.
AT_ONCE = 1000
#: About how many bytes the rows of a chunk have at most, by the size of so many of its first rows.
CHUNK_BYTES, SAMPLE = 16 << 20, 100
#: Keys of one query.
KEYS_AT_ONCE = 1000
# Loads values as the bytes that were sent: much faster than to take one after the other.
_AS_SENT, _BYTEA = AdaptersMap(), 17
_AS_SENT.register_loader(_BYTEA, ByteaBinaryLoader)
# What precedes a short value in a message of the stream, by the value's kind and size.
_HEADS = {kind: [kind + size.to_bytes(4) for size in range(256)] for kind in (b"b", b"t")}
#: How often the writers of a table are looked at, and after how long they are reported, in seconds.
WRITERS_EVERY, WRITERS_REPORTED = 0.05, 10.0
#: The first and the longest wait before a chunk is read again after a failure, in seconds.
BACKOFF = (0.2, 10.0)
#: The SQLSTATEs, and their beginnings, of a lost connection, of a server that starts or stops or
#: has no connection left, and of a deadlock.
TEMPORARY = ("08", "57P", "53300", "40")
#: What to do about other errors.
REMEDIES = {
    "42P01": "the table was renamed or dropped, or where= names one that does not exist. A "
    "follow() that is started again waits until its table exists",
    "42501": "`moored doctor URL --table NAME` prints the statement that this role needs",
    "53100": "free disk space at the server",
    "54001": "simplify where=, or raise max_stack_depth",
    "55P03": "end the session that locks the table, or raise lock_timeout for this role",
    "57014": "if it was a timeout, lower chunk_rows, or raise statement_timeout for this role",
}

Connection = psycopg.AsyncConnection[Any]
T = TypeVar("T")

_VIEW = f"SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, {MARKER}"


class TransactionLost(PostgresError):
    """A transaction may not exist on the server any more: the consumer was reset."""


class TableView(NamedTuple):
    """An open transaction that reads one snapshot."""

    conn: Connection
    #: The table as it is now.
    table: SourceTable
    sight: Sight
    limit: int


class CurrentRows(NamedTuple):
    """Changed rows as they are now."""

    #: The table, to read the rows.
    relation: Relation
    #: The rows that exist, as in the message of an insert, by the numbers of their keys.
    rows: dict[int, bytes]
    #: The end of the WAL when they were read.
    limit: int


Pieces = Callable[[TableView, Key | None, Key | None], AsyncGenerator[T, None]]


class TableReader:
    """Reads one table.

    :param connect: checks out a connection of the snapshot pool.
    :param where: a condition in SQL: only rows that meet it are read.
    :param columns: the columns to read, besides the key; None for all.
    :param rows: the number of rows of a chunk, at most; None for `ROWS` or `BYTE_ROWS`.
    :param publication: the publication by which the changes of the table are published.
    :param followed: whether keys of rows and changes are compared.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        types: Types,
        name: str,
        *,
        where: str | None,
        columns: Sequence[str] | None,
        rows: int | None,
        binary: bool,
        publication: str = "",
        followed: bool = False,
    ) -> None:
        self._connect = connect
        self._types = types
        self.name = name
        self._where = where
        self._columns = columns
        self._rows = rows
        #: Whether rows are copied as bytes, of which a chunk may have more.
        self.as_bytes = False
        self._binary = binary
        self._publication = publication
        self._followed = followed
        #: Whether the consumer was reset: transactions to wait for may not exist any more.
        self.was_reset: Callable[[], bool] = lambda: False
        # How many rows a chunk may have by its bytes: of very large rows, few are sampled.
        self._fitting = SAMPLE // 10
        self._table: SourceTable | None = None
        self._current: Relation | None = None

    @property
    def table(self) -> SourceTable:
        """The table, which must have been described."""
        assert self._table is not None
        return self._table

    async def begin(self) -> Lsn:
        """Describe the table, and return the LSN at which its changes must be read.

        Commits become visible in another order than they are in the WAL. So wait for the
        transactions that were writing to the table: then every later snapshot sees all its changes
        before that LSN. Other transactions may write to it meanwhile.
        """
        start, waiting = await self.retried(self._begin)
        since = asyncio.get_running_loop().time()
        reported = False
        while waiting and not self.was_reset():
            sight = await self.retried(self._sight)
            waiting = {xid for xid in waiting if not sight.sees(xid)}
            if not waiting:
                break
            if not reported and asyncio.get_running_loop().time() - since > WRITERS_REPORTED:
                reported = True
                log.warning(
                    "the copy of %s waits for transactions that write to it: %s",
                    self.table.qualified,
                    ", ".join(map(str, sorted(waiting))),
                )
            await asyncio.sleep(WRITERS_EVERY)
        return start

    async def _begin(self) -> tuple[Lsn, set[int]]:
        async with self._connect() as conn:
            self._table = await self._describe(conn)
        async with self._connect() as conn:
            (start,) = await _row(conn, "SELECT pg_current_wal_insert_lsn()::text")
            # In this order: a commit before that LSN holds its locks, or is visible.
            return Lsn.parse(start), await writers(conn, self._table)

    async def _sight(self) -> Sight:
        async with self._connect() as conn:
            (text,) = await _row(conn, "SELECT pg_current_snapshot()::text")
            return Sight.parse(text)

    async def history(self) -> History:
        """Return the history of the server that is read."""

        async def queried() -> History:
            async with self._connect() as conn:
                return History(*await _row(conn, HISTORY))

        return await self.retried(queried)

    async def describe(self) -> SourceTable:
        """Describe the table as it is now."""

        async def described() -> SourceTable:
            async with self._connect() as conn:
                return await self._describe(conn)

        self._table = await self.retried(described)
        return self._table

    async def _describe(self, conn: Connection) -> SourceTable:
        columns, publication = self._columns, self._publication
        table = await describe_table(conn, self.name, self._where, columns, publication)
        if self._followed and table.problem is not None:
            raise ConfigurationError(table.problem)
        return table

    async def retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something; after a failure of the connection, do it again."""
        backoff = Backoff(*BACKOFF, jitter="half")
        while True:
            try:
                return await work()
            except (psycopg.Error, TimeoutError, WaitTimeout) as error:
                raise_if_cancelled(error)
                if isinstance(error, psycopg.Error) and not _is_temporary(error):
                    raise self.failure(error) from error
                log.warning("reading %s is tried again: %s", self.name, describe(error))
            await asyncio.sleep(backoff.fail())

    def failure(self, error: psycopg.Error) -> PostgresError:
        """Return what is raised for an error of the server: a retry would not help."""
        remedy = f": {REMEDIES[state]}" if (state := error.sqlstate) in REMEDIES else ""
        return PostgresError(f"{self.name} cannot be read: {describe(error)}{remedy}")

    # -- chunks ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def view(self, *, altered: bool = False) -> AsyncIterator[TableView]:
        """Open a transaction with one snapshot.

        :param altered: accept that the columns of the table were changed.
        """
        table = self.table
        async with self._connect() as conn:
            lock = psycopg.sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(table.rows)
            # The lock is before the snapshot: TRUNCATE and ALTER TABLE in between would change what
            # an older snapshot sees.
            await conn.execute(
                psycopg.sql.SQL(
                    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; " + DISPLAY + "; "
                )
                + lock
            )
            found = await conn.execute(_VIEW, {"oid": table.oid})
            sight, limit, marker = await found.fetchone() or ("", "", "")
            if marker != table.marker:
                table = await self._describe(conn)
            if table.version != self.table.version and not altered:
                raise ColumnsChanged(
                    f"the table {table.qualified} was altered while it was copied: rows that were "
                    "copied before may lack the values of new columns"
                )
            yield TableView(conn, table, Sight.parse(sight), Lsn.parse(limit))

    async def bound(self, after: Key | None) -> Key | None:
        """Return the last key of the next chunk; None for the last chunk."""

        async def look() -> Key | None:
            async with self.view() as view:
                rows = await self._chunk_rows(view.conn, after)
                found = await view.conn.execute(self.table.bound(after, rows))
                row = await found.fetchone()
                return None if row is None else tuple(row)

        return await self.retried(look) if self.table.key else None

    async def _chunk_rows(self, conn: Connection, after: Key | None) -> int:
        """Return how many rows are read at once, by the size of the next ones."""
        most = self._rows or (BYTE_ROWS if self.as_bytes else ROWS)
        sample = min(SAMPLE, most, self._fitting)
        (size,) = await (await conn.execute(self.table.size(after, sample))).fetchone() or (None,)
        self._fitting = max(1, CHUNK_BYTES // max(size or 1, 1))
        return min(most, self._fitting)

    async def rows(
        self, view: TableView, after: Key | None, through: Key | None
    ) -> AsyncGenerator[pq.abc.PGresult, None]:
        """Yield the rows of a range of keys, as results of queries."""
        query = self.table.select(after, through)
        if through is not None:
            yield await self._result(view.conn, query)
            return
        some = await self._chunk_rows(view.conn, after)
        await view.conn.execute(psycopg.sql.SQL("DECLARE rows NO SCROLL CURSOR FOR ") + query)
        fetch = psycopg.sql.SQL("FETCH {} FROM rows").format(psycopg.sql.Literal(some))
        while (result := await self._result(view.conn, fetch)).ntuples:
            yield result

    async def _result(self, conn: Connection, query: psycopg.sql.Composed) -> pq.abc.PGresult:
        async with conn.cursor(binary=self._binary) as cursor:
            await cursor.execute(query, binary=self._binary)
            result = cursor.pgresult
        assert result is not None
        used = {result.ftype(column) for column in range(result.nfields)}
        if unknown := self._types.unknown(used):
            self._types.add(unknown, await _admin.own_types(conn, unknown))
        return result

    def load(
        self, result: pq.abc.PGresult, table: SourceTable | None = None
    ) -> Iterator[list[Row]]:
        """Convert a result to rows, some at a time."""
        make = _row_maker((table or self.table).columns)
        strict, lenient = (_transformer(self._types, result, each) for each in (False, True))
        for first in range(0, result.ntuples, AT_ONCE):
            last = min(first + AT_ONCE, result.ntuples)
            try:
                yield strict.load_rows(first, last, make)
            except (psycopg.DataError, psycopg.NotSupportedError, ValueError, OverflowError):
                yield lenient.load_rows(first, last, make)

    async def blocks(
        self, view: TableView, after: Key | None, through: Key | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the rows of a range of keys as COPY writes them in text format."""
        query = psycopg.sql.SQL("COPY ({}) TO STDOUT").format(self.table.select(after, through))
        if not view.conn.pgconn.ssl_in_use:
            async with aclosing(copy_blocks(view.conn, query.as_bytes(view.conn))) as blocks:
                async for block in blocks:
                    yield block
            return
        async with view.conn.cursor() as cursor, cursor.copy(query) as copy:
            rows = bytearray()
            async for row in copy:
                rows += row
                if len(rows) >= BLOCK_BYTES:
                    yield bytes(rows)
                    rows.clear()
            if rows:
                yield bytes(rows)

    # -- keys ------------------------------------------------------------------------------------

    async def places(self, bounds: Sequence[Key], keys: Sequence[KeyValues]) -> list[int]:
        """Return how many bounds are less than each key."""
        if not bounds or not keys:
            return [0] * len(keys)
        found = self.table.place(bounds, keys)
        if found is not None:
            return found

        async def queried() -> list[int]:
            places: list[int] = []
            async with self._connect() as conn:
                for first in range(0, len(keys), KEYS_AT_ONCE):
                    some = keys[first : first + KEYS_AT_ONCE]
                    rows = await conn.execute(self.table.place_by_server(bounds, some))
                    places += [place for (place,) in await rows.fetchall()]
            return places

        return await self.retried(queried)

    async def current(self, xid: int, keys: Sequence[KeyValues]) -> CurrentRows:
        """Return the rows with these keys that meet `where`, after a transaction or later.

        Raises `TransactionLost` after a reset.
        """

        async def look() -> CurrentRows | None:
            async with self.view(altered=True) as view:
                if not view.sight.sees(xid):
                    return None
                rows: dict[int, bytes] = {}
                relation = None
                for first in range(0, len(keys), KEYS_AT_ONCE):
                    some = keys[first : first + KEYS_AT_ONCE]
                    result = await self._result(view.conn, view.table.select_keys(some))
                    relation = self._relation(view.table, result)
                    rows |= _messages(result, first - 1)
                assert relation is not None
                return CurrentRows(relation, rows, view.limit)

        while (found := await self.retried(look)) is None:
            if self.was_reset():
                raise TransactionLost(f"the transaction {xid} may not exist any more")
            await asyncio.sleep(WRITERS_EVERY)
        return found

    def _relation(self, table: SourceTable, result: pq.abc.PGresult) -> Relation:
        """Return what reads the rows of a result; the same for all alike."""
        keys = {column.name for column in table.key}
        columns = tuple(
            Column(name, result.ftype(place), result.fmod(place), name in keys)
            for place, name in enumerate(table.columns, 1)
        )
        new = Relation(table.oid, table.schema, table.name, ReplicaIdentity.DEFAULT, columns)
        new.types, known = self._types, self._current
        if known is None or (known.qualified, known.columns) != (new.qualified, columns):
            known = self._current = new
        return known

    async def read(
        self, pieces: Pieces[T], after: Key | None, through: Key | None
    ) -> tuple[list[T], Chunk]:
        """Read a chunk; after a failure of the connection, with another snapshot.

        :param pieces: reads a range of keys: `rows` or `blocks`.
        """

        async def attempt() -> tuple[list[T], Chunk]:
            async with self.view() as view:
                async with aclosing(pieces(view, after, through)) as each:
                    found = [piece async for piece in each]
                return found, Chunk(through, view.sight, view.limit)

        return await self.retried(attempt)


def _messages(result: pq.abc.PGresult, first: int) -> dict[int, bytes]:
    """Return the rows of a result as the stream would have them, by the number before each."""
    binary = result.fformat(0) == pq.Format.BINARY
    kind, start = b"b" if binary else b"t", b"N" + (result.nfields - 1).to_bytes(2)
    heads, found = _HEADS[kind], {}
    transformer = Transformer(_AS_SENT)
    transformer.set_pgresult(result, set_loaders=False)
    transformer.set_loader_types([_BYTEA] * result.nfields, pq.Format.BINARY)
    for at, *values in transformer.load_rows(0, result.ntuples, tuple):
        try:
            parts = [b"n" if value is None else heads[len(value)] + value for value in values]
        except IndexError:
            parts = [b"n" if v is None else kind + len(v).to_bytes(4) + v for v in values]
        found[first + (int.from_bytes(at) if binary else int(at))] = start + b"".join(parts)
    return found


def _is_temporary(error: psycopg.Error) -> bool:
    """Return whether an error is that of a connection, and not of a statement."""
    state = error.sqlstate or TEMPORARY[0]
    return isinstance(error, psycopg.OperationalError) and state.startswith(TEMPORARY)


async def _row(conn: Connection, query: str) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await conn.execute(query.encode())).fetchone()
    assert row is not None
    return row


def _transformer(types: Types, result: pq.abc.PGresult, lenient: bool) -> Any:
    transformer = Transformer(types.adapters(lenient=lenient))
    transformer.set_pgresult(result)
    return transformer


@cache
def _row_maker(names: tuple[str, ...]) -> Callable[[Sequence[Any]], Row]:
    """Generate the function that makes a dict of the values of a row."""
    pairs = ", ".join(f"{name!r}: v[{place}]" for place, name in enumerate(names))
    make: Callable[[Sequence[Any]], Row] = eval(f"lambda v: {{{pairs}}}")
    return make


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait for its end, whatever its result."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it was retrieved
