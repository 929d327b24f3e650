"""The readers that replication.py compares: ours, pg_recvlogical, and other Python drivers.

Each side is a function that reads the whole log and returns the seconds since the start of the
stream. Its docstring says what it does with the rows.
"""

from __future__ import annotations

import asyncio
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras

from _replication_data import OPTIONS, PUBLICATION, START, Checksum, Log
from moored.postgres import Changes, Postgres, Reset, Transaction

__all__ = [
    "Recvlogical",
    "consumer",
    "peek",
    "psycopg2_decoded",
    "psycopg2_raw",
    "psycopg3_raw",
    "stream",
]

Side = Callable[[Log], float]


# -- ours --------------------------------------------------------------------------------------


def consumer(log: Log) -> float:
    """Decode every transaction to column values, compute the checksum, and acknowledge."""
    return _ours(log, partial(_consume, log))


async def _consume(log: Log, changes: Changes) -> None:
    wanted = log.rows
    count, hashed, amounts, times = Checksum()
    async for txn in changes:
        assert isinstance(txn, Transaction)
        for change in txn:
            row: Any = change.new
            count += 1
            hashed = hash((hashed, row["id"], row["account"], row["note"]))
            amounts += row["amount"]
            times += row["at"] - START
        await txn.ack()
        if count >= wanted:
            break
    found = Checksum(count, hashed, amounts, times)
    if found != log.checksum:
        raise AssertionError(f"the consumer found {found} instead of {log.checksum}")


def stream(log: Log) -> float:
    """Receive and acknowledge every transaction, without decoding its values."""

    async def read(changes: Changes) -> None:
        rows, wanted = 0, log.rows
        async for txn in changes:
            assert not isinstance(txn, Reset)
            rows += len(txn)
            await txn.ack()
            if rows >= wanted:
                break
        if rows != log.rows:
            raise AssertionError(f"received {rows} rows instead of {log.rows}")

    return _ours(log, read)


def _ours(log: Log, read: Callable[[Changes], Any]) -> float:
    with log.copied_slot() as slot, tempfile.TemporaryDirectory() as state:
        return asyncio.run(_run_ours(log.url, slot, state, read))


async def _run_ours(url: str, slot: str, state: str, read: Callable[[Changes], Any]) -> float:
    postgres = Postgres(
        url,
        pool_size=2,
        state_dir=state,
        slot=slot,
        publication=PUBLICATION,
        manual_publication=True,
    )
    async with postgres as pg, pg.changes("bench") as changes:
        begin = asyncio.create_task(_streaming_since(pg))
        await read(changes)
        return time.perf_counter() - await begin


async def _streaming_since(pg: Postgres) -> float:
    async for event in pg.events():
        if event.name == "ready":
            break
    return time.perf_counter()


# -- PostgreSQL's tools ------------------------------------------------------------------------


class Recvlogical:
    """PostgreSQL's own client, writing to /dev/null; its start is not counted."""

    def __init__(self, bin_dir: Path) -> None:
        self._program = bin_dir / "pg_recvlogical"

    def __call__(self, log: Log) -> float:
        """Receive every message, and write its bytes to /dev/null."""
        with log.copied_slot() as slot:
            idle = min(self._run(log.url, slot, "0/1") for _ in range(3))
            return self._run(log.url, slot, log.end) - idle

    def _run(self, url: str, slot: str, end: str) -> float:
        command = [
            str(self._program),
            "-d",
            url,
            "-S",
            slot,
            "-f",
            "/dev/null",
            "--start",
            "--no-loop",
        ]
        options = [part for key, value in OPTIONS.items() for part in ("-o", f"{key}={value}")]
        begin = time.perf_counter()
        subprocess.run(
            [*command, f"--endpos={end}", *options], check=True, stderr=subprocess.DEVNULL
        )
        return time.perf_counter() - begin


def peek(log: Log) -> float:
    """Decode inside the server, without a stream: the upper bound."""
    query = "select count(*) from pg_logical_slot_peek_binary_changes(%s, null, null, variadic %s)"
    options = [part for pair in OPTIONS.items() for part in pair]
    with psycopg.connect(log.url, autocommit=True) as conn:
        conn.execute("set work_mem = '1GB'")
        begin = time.perf_counter()
        (count,) = conn.execute(query, [log.slot, options]).fetchone() or (0,)
        seconds = time.perf_counter() - begin
    if count < log.rows + 2 * log.transactions:
        raise AssertionError(f"{count} messages are too few")
    return seconds


# -- peers -------------------------------------------------------------------------------------

_size = struct.Struct("!I").unpack_from
_columns = struct.Struct("!H").unpack_from


def psycopg2_raw(log: Log) -> float:
    """Count rows with psycopg2's replication cursor, with feedback for each commit."""
    return _psycopg2(log, lambda payload: None)


def psycopg2_decoded(log: Log) -> float:
    """Split each row into a dict of strings, with psycopg2's replication cursor."""
    names = ("id", "account", "amount", "note", "at")
    return _psycopg2(log, lambda payload: _strings(payload, names))


def _strings(data: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an insert, as strings."""
    at, values = 8, []
    for _ in range(_columns(data, 6)[0]):
        begin = at + 5
        at = begin + _size(data, at + 1)[0]
        values.append(data[begin:at].decode())
    return dict(zip(names, values, strict=True))


class _Done(Exception):
    pass


def _psycopg2(log: Log, use: Callable[[bytes], object]) -> float:
    rows = 0

    def take(message: Any) -> None:
        nonlocal rows
        payload = message.payload
        kind = payload[0]
        if kind == 73:
            rows += 1
            use(payload)
        elif kind == 67:
            message.cursor.send_feedback(flush_lsn=message.data_start)
            if rows >= log.rows:
                raise _Done

    with log.copied_slot() as slot:
        connection = psycopg2.connect(
            log.url, connection_factory=psycopg2.extras.LogicalReplicationConnection
        )
        try:
            cursor = connection.cursor()
            begin = time.perf_counter()
            cursor.start_replication(slot_name=slot, decode=False, options=OPTIONS)
            try:
                cursor.consume_stream(take)
            except _Done:
                return time.perf_counter() - begin
        finally:
            connection.close()
    raise AssertionError("the stream has no end")


def psycopg3_raw(log: Log) -> float:
    """Count rows with libpq through psycopg 3, message by message."""
    listed = ", ".join(f"{key} '{value}'" for key, value in OPTIONS.items())
    with (
        log.copied_slot() as slot,
        closing(psycopg.connect(log.url, autocommit=True, replication="database")) as connection,
    ):
        begin = time.perf_counter()
        connection.execute(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 ({listed})".encode())
        _read_by_libpq(connection.pgconn, log.rows)
        return time.perf_counter() - begin


def _read_by_libpq(pgconn: Any, wanted: int) -> None:
    rows = 0
    while True:
        size, data = pgconn.get_copy_data(1)
        if size > 0:
            if data[0] == 119 and data[25] == 73:
                rows += 1
            elif data[0] == 119 and data[25] == 67:
                end = int.from_bytes(data[35:43])
                pgconn.put_copy_data(struct.pack("!cQQQqB", b"r", end, end, end, 0, 0))
                pgconn.flush()
                if rows >= wanted:
                    return
        elif size == 0:
            select.select([pgconn.socket], [], [])
            pgconn.consume_input()
        else:
            raise AssertionError("the stream has ended")
