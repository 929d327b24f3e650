"""Messages are assembled into transactions, in order and out of order."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.postgres.recording import (
    Recorder,
    begin,
    commit,
    feed_all,
    framed,
    insert,
    relation,
    summary,
    text,
    texts,
)
from tests.postgres.workload import Workload

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import DecodeError, Emitted, Insert
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._body import Body, Shelf
from moored.postgres.decode._transaction import Committed
from moored.testing import base_seed, scaled

T = relation([("id", 23)])


def rows(*committed: Committed) -> list[list[Any]]:
    """The numbers that were inserted, by transaction."""
    return [
        [change.new["id"] for change in each if isinstance(change, Insert) and change.new]
        for each in committed
    ]


def add(number: int) -> bytes:
    return insert(texts(str(number)))


def emitted(lsn: int = 0x77, *, transactional: bool = False) -> bytes:
    return b"M" + struct.pack("!BQ", transactional, lsn) + text("app") + b"\0\0\0\1x"


# -- whole transactions --------------------------------------------------------------------------


def test_a_transaction_has_its_lsns_and_its_changes() -> None:
    assembler = Assembler()
    states = []
    committed = None
    for message in (begin(731, 0x1000, 5), T, add(1), add(2), commit(0x1000, 0x1030, 5)):
        committed = assembler.feed(framed(message))
        states.append(assembler.inside)
    assert committed is not None
    assert states == [True, True, True, True, False]
    assert (committed.xid, committed.commit_lsn, committed.end_lsn) == (731, 0x1000, 0x1030)
    assert committed.time == 5
    assert committed.commit_time == datetime(2000, 1, 1, 0, 0, 0, 5, tzinfo=UTC)
    assert committed.origin is None
    assert committed.body.count == 2
    assert rows(committed) == [[1, 2]]


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
)
def test_begins_and_commits_of_every_size(lsn: int, size: int, time: int, xid: int) -> None:
    (found,) = feed_all([begin(xid, lsn, time), commit(lsn, lsn + size, time)])
    assert (found.xid, found.commit_lsn, found.end_lsn, found.time) == (xid, lsn, lsn + size, time)


def test_later_transactions_know_tables_that_were_described_before() -> None:
    found = feed_all([begin(), T, add(1), commit(), begin(), add(2), commit(), begin(), commit()])
    assert rows(*found) == [[1], [2], []]


def test_a_transaction_keeps_the_table_descriptions_of_its_time() -> None:
    wide = relation([("id", 23), ("name", 25)])
    first, second = feed_all(
        [begin(), T, add(1), commit(), begin(), wide, insert(texts("2", "b")), commit()]
    )
    assert rows(second, first) == [[2], [1]]
    assert [set(each.known()[16400].names) for each in (first, second)] == [{"id"}, {"id", "name"}]
    assert first.touched() == {16400}


def test_names_of_types_are_ignored() -> None:
    message = b"Y" + struct.pack("!I", 16500) + text("shop") + text("mood")
    (committed,) = feed_all([message, begin(), message, T, add(1), commit()])
    assert rows(committed) == [[1]]


def test_an_origin_belongs_to_its_transaction() -> None:
    (committed,) = feed_all([begin(), b"O" + bytes(8) + text("up"), T, commit()])
    assert committed.origin == "up"


def test_a_message_outside_of_a_transaction_is_a_transaction_of_its_own() -> None:
    assembler = Assembler()
    alone = assembler.feed(framed(emitted(), sent=1_000_000))
    assert alone is not None
    assert (alone.xid, alone.commit_lsn, alone.end_lsn) == (0, 0x77, 0x77)
    assert alone.commit_time == datetime(2000, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert list(alone) == [Emitted("app", b"x")]
    assert not assembler.inside


def test_a_non_transactional_message_does_not_end_the_current_transaction() -> None:
    first, second = feed_all([begin(), T, add(1), emitted(), add(2), commit()])
    assert list(first) == [Emitted("app", b"x")]
    assert rows(second) == [[1, 2]]


def test_a_transactional_message_is_a_change_of_its_transaction() -> None:
    (committed,) = feed_all([begin(), T, add(1), emitted(transactional=True), commit()])
    assert [change.kind for change in committed] == ["insert", "message"]


# -- out of order --------------------------------------------------------------------------------

DISORDER: dict[str, list[bytes]] = {
    "a row outside": [add(1)],
    "a commit outside": [commit()],
    "a truncate outside": [b"T" + struct.pack("!IBI", 1, 0, 16400)],
    "an origin outside": [b"O" + bytes(8) + text("up")],
    "begin within a transaction": [begin(), begin()],
    "commit at another place": [begin(final=0x1000), commit(0x1008, 0x1030)],
    "commit that ends before it begins": [begin(final=0x1000), commit(0x1000, 0xFFF)],
    "a part of a transaction in progress": [b"S" + struct.pack("!IB", 1, 1)],
    "a prepared transaction": [b"b" + struct.pack("!QQqI", 0x10, 0x20, 0, 700) + text("g")],
}


@pytest.mark.parametrize("messages", DISORDER.values(), ids=DISORDER)
def test_messages_out_of_order_are_errors(messages: list[bytes]) -> None:
    assembler = Assembler()
    for message in messages[:-1]:
        assembler.feed(framed(message))
    with pytest.raises(DecodeError):
        assembler.feed(framed(messages[-1]))


@pytest.mark.parametrize("size", range(26))
def test_an_empty_message_is_an_error(size: int) -> None:
    with pytest.raises(DecodeError):
        Assembler().feed(framed(b"\0")[:size])


@pytest.mark.parametrize("message", [begin()[:-1], begin() + b"\0", commit()[:-1], commit() + b"x"])
def test_begins_and_commits_of_the_wrong_size_are_errors(message: bytes) -> None:
    assembler = Assembler()
    if message[:1] == b"C":
        assembler.feed(framed(begin()))
    with pytest.raises(DecodeError):
        assembler.feed(framed(message))


# -- from a real server --------------------------------------------------------------------------


@pytest.fixture
def recorder(postgres_url: str) -> Iterator[Recorder]:
    with Recorder.on(postgres_url) as recorder:
        yield recorder


Told = tuple[int, int, int, int, str | None, list[Any]]


def told(committed: Committed) -> Told:
    changes = [summary(change) for change in committed]
    return (
        committed.xid,
        committed.commit_lsn,
        committed.end_lsn,
        0 if committed.xid == 0 else committed.time,
        committed.origin,
        changes,
    )


@pytest.mark.parametrize("number", range(scaled(20, least=2)))
def test_formats_and_files_give_the_same_transactions(
    recorder: Recorder, number: int, tmp_path: Path
) -> None:
    """Large transactions at once, with subtransactions that are rolled back, and new columns."""
    workload = Workload(recorder.url, base_seed() + number)
    slot = recorder.slot()
    try:
        workload.run(150)
    finally:
        workload.close()
    # Otherwise the last message may not be on the disk yet, which is where slots read.
    recorder.run("set synchronous_commit = on", "create table last ()")
    wanted = [told(committed) for committed in recorder.transactions(slot, messages="true")]
    lsns = [lsn for _, lsn, *_ in wanted]
    assert lsns == sorted(lsns)
    for binary in ("false", "true"):
        messages = recorder.peek(slot, messages="true", binary=binary)
        for shelf in (Shelf(tmp_path, 1000), Shelf(tmp_path)):
            found = feed_all(messages, Assembler(partial(Body, shelf)))
            assert [told(each) for each in found] == wanted


def test_origins_of_a_real_server(recorder: Recorder) -> None:
    recorder.run("create table t (id int)", "select pg_replication_origin_create('upstream')")
    slot = recorder.slot()
    try:
        recorder.run(
            "insert into t values (1)",
            "select pg_replication_origin_session_setup('upstream')",
        )
        recorder.transaction(
            "select pg_replication_origin_xact_setup('0/1234', now())",
            "insert into t values (2)",
        )
        recorder.transaction(
            "select pg_replication_origin_xact_setup('0/2345', now())",
            "insert into t select generate_series(1, 5000)",
        )
        recorder.run("select pg_replication_origin_session_reset()", "insert into t values (3)")
        assert [(each.origin, each.body.count) for each in recorder.transactions(slot)] == [
            (None, 1),
            ("upstream", 1),
            ("upstream", 5000),
            (None, 1),
        ]
    finally:
        recorder.run("select pg_replication_origin_drop('upstream')")


def test_a_type_that_is_not_built_in_is_a_string(recorder: Recorder) -> None:
    recorder.run("create schema shop", "create type shop.mood as enum ('happy')")
    recorder.run("create table t (id int, mood shop.mood)")
    slot = recorder.slot()
    recorder.run("insert into t values (1, 'happy')")
    (committed,) = recorder.transactions(slot)
    (change,) = committed
    assert isinstance(change, Insert)
    assert change.new == {"id": 1, "mood": "happy"}


def test_emitted_messages_of_a_real_server(recorder: Recorder) -> None:
    recorder.run("create table t (id int)")
    slot = recorder.slot()
    recorder.transaction(
        "insert into t values (1)",
        "select pg_logical_emit_message(true, 'with', 'a')",
        "select pg_logical_emit_message(false, 'without', '\\x00ff'::bytea)",
    )
    assert recorder.changes(slot) == [("insert", "t", None, {"id": 1})]
    alone, whole = recorder.transactions(slot, messages="true")
    assert list(alone) == [Emitted("without", b"\0\xff")]
    assert alone.end_lsn <= whole.commit_lsn
    assert [summary(change) for change in whole] == [
        ("insert", "t", None, {"id": 1}),
        ("message", "with", b"a"),
    ]


def test_messages_that_are_not_wanted_only_wake_outboxes(recorder: Recorder) -> None:
    recorder.run("create table t (id int)")
    slot = recorder.slot()
    wake = "select pg_logical_emit_message(true, 'moored_outbox', '')"
    recorder.transaction("insert into t values (1)", wake)
    recorder.transaction(wake, wake)
    recorder.run("select pg_logical_emit_message(false, 'moored_outbox', '')")
    recorder.run("select pg_logical_emit_message(true, 'other', 'text')")
    found = feed_all(recorder.peek(slot, messages="true"), Assembler(messages=False))
    assert [(each.wakes, each.body.count, each.only_messages) for each in found] == [
        ({"moored_outbox"}, 1, False),
        ({"moored_outbox"}, 0, True),
        (frozenset(), 0, True),
    ]


def test_a_prepared_transaction_is_sent_whole_after_its_second_phase() -> None:
    options = {"max_prepared_transactions": "10"}
    with SyncEmbeddedPostgres(options=options) as server, Recorder.on(server.url) as recorder:
        recorder.run("create table t (id int)")
        slot = recorder.slot()
        for number, end in enumerate(("commit", "rollback")):
            with psycopg.connect(server.url) as other:
                other.execute("insert into t select generate_series(1, 100)")
                other.execute(f"prepare transaction 'gid{number}'".encode())
            recorder.run("insert into t values (0)")
            recorder.connection.execute(f"{end} prepared 'gid{number}'".encode())
        found = recorder.transactions(slot)
        assert rows(*found) == [[0], list(range(1, 101)), [0]]
