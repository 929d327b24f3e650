"""The data of replication.py: one table, written in transactions of a given size.

The table has five columns and about 100 bytes per row::

    payments (id bigint primary key, account int, amount numeric(12, 2), note text, at timestamptz)

Each run of each side reads from a new slot, a copy of one that was created before the rows were
written, so that all runs read the same WAL from the same LSN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg

__all__ = ["OPTIONS", "PUBLICATION", "START", "Checksum", "Log", "prepare", "written"]

PUBLICATION = "bench"
#: The options of pgoutput, the same for every side.
OPTIONS = {"proto_version": "1", "publication_names": PUBLICATION}

_TABLE = """
    create table payments (
        id bigint primary key, account int not null, amount numeric(12, 2) not null,
        note text not null, at timestamptz not null
    );
    create table marks (id int primary key);
    create procedure write_payments(transactions int, size int) language plpgsql as $$
    declare
        first bigint;
    begin
        for nth in 0 .. transactions - 1 loop
            first := nth * size::bigint;
            insert into payments select
                first + n, (first + n) * 7919 % 100000, ((first + n) * 31 % 10000000) / 100.0,
                'payment number ' || first + n || ' of a customer, by card',
                '2026-01-01 00:00:00+00'::timestamptz + (first + n) * interval '1.000017 seconds'
            from generate_series(1, size) n;
            commit;
        end loop;
    end $$;
    create publication bench for table payments, marks;
"""
#: The origin of the times of payments.
START = datetime(2026, 1, 1, tzinfo=UTC)
_names = itertools.count(1)


class Checksum(NamedTuple):
    """A checksum over all columns of rows.

    A payment's id, account and note go into a running hash; its amount and its time, whose hashes
    Python computes slowly, into sums.
    """

    rows: int = 0
    hashed: int = 0
    amounts: Decimal = Decimal(0)
    times: timedelta = timedelta()


class Log(NamedTuple):
    """Transactions in the server's WAL, with their checksum."""

    url: str
    slot: str
    size: int
    transactions: int
    #: The LSN after the last transaction; a mark follows, so that the stream reaches it.
    end: str
    checksum: Checksum

    @property
    def rows(self) -> int:
        """The number of rows of all transactions."""
        return self.transactions * self.size

    @contextmanager
    def copied_slot(self) -> Iterator[str]:
        """Yield a slot for one run, and drop it afterwards."""
        name = f"bench_run_{next(_names)}"
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute("select pg_copy_logical_replication_slot(%s, %s)", [self.slot, name])
        try:
            yield name
        finally:
            with psycopg.connect(self.url, autocommit=True) as conn:
                conn.execute(
                    "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots "
                    "where slot_name = %s and active_pid is not null",
                    [name],
                )
                conn.execute("select pg_drop_replication_slot(%s)", [name])


def prepare(url: str) -> None:
    """Create the tables, the procedure and the publication."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(_TABLE)


@contextmanager
def written(url: str, transactions: int, size: int, *, summed: bool = True) -> Iterator[Log]:
    """Write transactions of this size to the WAL; empty the table before and afterwards."""
    slot = f"bench_keep_{next(_names)}"
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("set synchronous_commit = off")
        conn.execute("set timezone = 'UTC'")
        conn.execute("truncate payments, marks")
        conn.execute("checkpoint")
        conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        try:
            conn.execute("call write_payments(%s, %s)", [transactions, size])
            (end,) = conn.execute("select pg_current_wal_insert_lsn()::text").fetchone() or ("",)
            conn.execute("insert into marks values (1)")
            conn.execute("checkpoint")
            found = _checksum(conn) if summed else Checksum()
            yield Log(url, slot, size, transactions, end, found)
        finally:
            conn.execute("select pg_drop_replication_slot(%s)", [slot])
            conn.execute("truncate payments, marks")


def _checksum(conn: psycopg.Connection[Any]) -> Checksum:
    count, hashed, amounts, times = Checksum()
    with conn.transaction(), conn.cursor("rows") as cursor:
        cursor.itersize = 20_000
        cursor.execute("select id, account, amount, note, at from payments order by id")
        for number, account, amount, note, at in cursor:
            count += 1
            hashed = hash((hashed, number, account, note))
            amounts += amount
            times += at - START
    return Checksum(count, hashed, amounts, times)
