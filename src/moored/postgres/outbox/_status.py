"""The state of an outbox for operators: size, age, what holds delivery back, and each consumer."""

from __future__ import annotations

from typing import Any, NamedTuple

from moored.kernel import counted, duration

from ..server._admin import without_literals
from ._cursor import Cursor
from ._ddl import Wake
from ._reader import Reader

_SIZE = """
select sum(bytes)::bigint, count(*)::int,
    (select extract(epoch from clock_timestamp() - o.at)::float8
     from {schema}.outbox o order by o.id limit 1)
from {schema}.outbox_parts
"""
# pg_locks shows the pid of a holder to every role. A prepared transaction has none: it is found by
# its transaction ID.
_HELD = """
select extract(epoch from clock_timestamp() - e.at)::float8, a.pid, current_database(),
    extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8,
    coalesce(a.application_name, ''), coalesce(left(a.query, 200), ''), p.gid
from (select at from {schema}.outbox where id > %(final)s order by id limit 1) as e
left join pg_stat_activity a on a.pid
    in (select l.pid from pg_locks l where l.virtualtransaction = %(holder)s)
left join pg_prepared_xacts p on a.pid is null and p.transaction
    in (select l.transactionid from pg_locks l where l.virtualtransaction = %(holder)s)
where coalesce(a.pid::text, p.gid) is not null
"""
_CONSUMERS = """
select c.consumer, c.cursor, extract(epoch from clock_timestamp() - c.stored)::float8,
    coalesce((
        select extract(epoch from clock_timestamp() - o.at)::float8 from {schema}.outbox o
        where o.id > split_part(c.cursor, '-', 3)::bigint
        order by o.id limit 1
    ), 0)
from {schema}.outbox_cursors c order by c.consumer
"""


#: How publishers wake consumers; no row without an outbox.
_WAKE = """
select case when t.oid is null then 'poll' when p.prosrc like '%pg_logical_emit_message%'
    then 'stream' else 'notify' end
from pg_class c
left join pg_trigger t on t.tgrelid = c.oid and t.tgname = 'outbox_wake' and t.tgenabled <> 'D'
left join pg_proc p on p.oid = t.tgfoid
where c.oid = to_regclass({outbox})
"""


class HeldBack(NamedTuple):
    """Events wait for the end of a transaction that has published, and may have lower ids."""

    #: For how long the first of these events waits, in seconds.
    waiting: float
    #: The server process of the transaction; None for a prepared transaction, see `gid`.
    pid: int | None
    database: str
    #: The age of the transaction in seconds; None if this role may not see it.
    age: float | None
    application: str
    #: Its last statement, without literals; empty unless `show_queries`.
    query: str
    #: The identifier of a prepared transaction.
    gid: str | None

    @property
    def lasted(self) -> float:
        """For how long the transaction may have held events back, which may be older than it."""
        return self.waiting if self.age is None else min(self.waiting, self.age)

    @property
    def statement(self) -> str:
        """The statement that ends the transaction, if its program does not."""
        if self.gid is None:
            return f"SELECT pg_terminate_backend({self.pid})"
        return "ROLLBACK PREPARED '{}'".format(self.gid.replace("'", "''"))

    @property
    def remedy(self) -> str:
        """What ends the transaction."""
        how = "" if self.gid is None else " with COMMIT PREPARED"
        return f"commit it{how}, or run {self.statement}"

    def __str__(self) -> str:
        who = f"transaction of backend {self.pid}"
        if self.gid is not None:
            who = f"prepared transaction {self.gid!r}"
        age = "" if self.age is None else f", open for {duration(self.age)}"
        what = f": {self.query}" if self.query else ""
        name = f' (application "{self.application}")' if self.application else ""
        found = f"events have waited for {duration(self.waiting)} for the end of the {who}"
        return f"{found} in database {self.database!r}{name}{age}{what}"


class ConsumerLag(NamedTuple):
    """How far a consumer is behind."""

    name: str
    cursor: Cursor
    #: The age of the stored cursor, in seconds.
    stored: float
    #: The age of the oldest event after the cursor, in seconds; 0 if there is none. For a consumer
    #: with a filter it includes events of others for up to a minute.
    lag: float


class OutboxStatus(NamedTuple):
    """The state of an outbox."""

    #: Bytes of all partitions with their indexes.
    bytes: int
    partitions: int
    #: The age of the oldest stored event in seconds; None if there is none.
    oldest: float | None
    held_back: HeldBack | None
    consumers: tuple[ConsumerLag, ...]
    #: How publishers wake consumers, as it is installed: "notify", "stream" or "poll".
    wake: str = "notify"

    def plain(self) -> dict[str, Any]:
        """Return it in types that JSON can represent."""
        consumers = [{**each._asdict(), "cursor": str(each.cursor)} for each in self.consumers]
        held = self.held_back and self.held_back._asdict()
        return {**self._asdict(), "held_back": held, "consumers": consumers}

    def __str__(self) -> str:
        oldest = "empty" if self.oldest is None else f"oldest event {duration(self.oldest)} old"
        size = f"{self.bytes:,} bytes in {counted(self.partitions, 'partition')}"
        return f"{size}, {oldest}, {counted(len(self.consumers), 'consumer')}"


async def read_status(reader: Reader, *, show_queries: bool) -> OutboxStatus:
    """Query the state of an outbox."""
    ((size, partitions, oldest),) = await reader.run(_SIZE)
    held = await held_back(reader, show_queries=show_queries)
    consumers = tuple(
        ConsumerLag(name, Cursor.parse(cursor), stored, lag)
        for name, cursor, stored, lag in await reader.run(_CONSUMERS)
    )
    wake = await installed_wake(reader) or "poll"
    return OutboxStatus(size, partitions, oldest, held, consumers, wake)


async def installed_wake(reader: Reader) -> Wake | None:
    """Return how publishers wake consumers; None if there is no outbox."""
    rows = await reader.run(_WAKE)
    return rows[0][0] if rows else None


async def held_back(reader: Reader, *, show_queries: bool) -> HeldBack | None:
    """Return what the events wait for that wait since the last look, if there are any."""
    look = await reader.looks.from_now()
    if look.barrier.holder is not None:  # it may have been any publisher: look for one that stays
        look = await reader.looks.from_now()
    if (holder := look.barrier.holder) is None:
        return None
    rows = await reader.run(_HELD, final=look.final, holder=holder)
    for waiting, pid, database, age, application, query, gid in rows:
        shown = without_literals(query) if show_queries else ""
        return HeldBack(waiting, pid, database, age, application, shown, gid)
    return None
