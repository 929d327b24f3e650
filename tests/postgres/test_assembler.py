"""Messages are assembled into transactions: complete, in parts, prepared, and out of order."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
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


# -- messages of parts and phases ----------------------------------------------------------------


def start(xid: int, *, first: bool = True) -> bytes:
    return b"S" + struct.pack("!IB", xid, first)


STOP = b"E"


def stream_commit(xid: int, lsn: int = 0x2000) -> bytes:
    return b"c" + struct.pack("!IBQQq", xid, 0, lsn, lsn + 0x30, 7)


def stream_abort(xid: int, subxid: int | None = None) -> bytes:
    return b"A" + struct.pack("!II", xid, xid if subxid is None else subxid)


def streamed_relation(xid: int) -> bytes:
    return relation([("id", 23)], xid=xid)


def add(number: int, xid: int | None = None) -> bytes:
    return insert(texts(str(number)), xid=xid)


def begin_prepare(xid: int = 700, gid: str = "g") -> bytes:
    return b"b" + struct.pack("!QQqI", 0x10, 0x20, 0, xid) + text(gid)


def prepare(xid: int = 700, gid: str = "g", kind: bytes = b"P") -> bytes:
    return kind + struct.pack("!BQQqI", 0, 0x10, 0x20, 0, xid) + text(gid)


def commit_prepared(gid: str = "g") -> bytes:
    return b"K" + struct.pack("!BQQqI", 0, 0x30, 0x40, 9, 700) + text(gid)


def rollback_prepared(gid: str = "g") -> bytes:
    return b"r" + struct.pack("!BQQqqI", 0, 0x20, 0x50, 0, 0, 700) + text(gid)


def emitted(lsn: int = 0x77, *, transactional: bool = False, xid: int | None = None) -> bytes:
    prefix = b"" if xid is None else struct.pack("!I", xid)
    return b"M" + prefix + struct.pack("!BQ", transactional, lsn) + text("app") + b"\0\0\0\1x"


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
    assert (committed.origin, committed.streamed) == (None, False)
    assert len(committed) == 2
    assert rows(committed) == [[1, 2]]


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


def test_type_messages_are_recorded_by_oid() -> None:
    assembler = Assembler()
    message = b"Y" + struct.pack("!I", 16500) + text("shop") + text("mood")
    feed_all([begin(), message, T, commit()], assembler)
    assert assembler.type_names == {16500: "shop.mood"}


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
    first, second = feed_all(
        [start(1), streamed_relation(1), add(1, 1), emitted(xid=1), STOP, stream_commit(1)]
    )
    assert list(first) == [Emitted("app", b"x")]
    assert rows(second) == [[1]]


def test_a_transactional_message_is_a_change_of_its_transaction() -> None:
    (committed,) = feed_all([begin(), T, add(1), emitted(transactional=True), commit()])
    assert [change.kind for change in committed] == ["insert", "message"]


# -- in parts ------------------------------------------------------------------------------------


PART = [start(1), streamed_relation(1), add(1, 1)]


def test_streamed_transactions_are_returned_at_their_commit() -> None:
    found = feed_all(
        [
            start(1), streamed_relation(1), add(1, 1), STOP,
            start(2), streamed_relation(2), add(2, 2), STOP,
            begin(), T, add(3), commit(),
            start(1, first=False), add(4, 1), STOP,
            stream_commit(2, 0x3000),
            start(1, first=False), add(5, 1), STOP,
            stream_commit(1, 0x4000),
        ]
    )  # fmt: skip
    assert rows(*found) == [[3], [2], [1, 4, 5]]
    assert [(each.xid, each.commit_lsn, each.end_lsn) for each in found[1:]] == [
        (2, 0x3000, 0x3030),
        (1, 0x4000, 0x4030),
    ]
    assert [each.streamed for each in found] == [False, True, True]


def test_a_rolled_back_streamed_transaction_is_discarded() -> None:
    assembler = Assembler()
    parts = [start(1), streamed_relation(1), add(1, 1), STOP]
    assert feed_all([*parts, stream_abort(1)], assembler) == []
    assert assembler.pending == 0
    # The number may be used again after that.
    (committed,) = feed_all([*parts, stream_commit(1)], assembler)
    assert rows(committed) == [[1]]


def test_rolled_back_subtransactions_are_left_out() -> None:
    with_place = stream_abort(1, 13) + struct.pack("!Qq", 0x99, 0)
    (committed,) = feed_all(
        [
            start(1), streamed_relation(1), add(1, 1), add(2, 11), add(3, 12), STOP,
            stream_abort(1, 11),
            start(1, first=False), add(4, 13), add(5, 1), add(6, 12),
            b"T" + struct.pack("!IIBI", 13, 1, 0, 16400), emitted(transactional=True, xid=13), STOP,
            with_place,
            stream_commit(1),
        ]
    )  # fmt: skip
    assert [summary(change)[-1] for change in committed] == [{"id": n} for n in (1, 3, 5, 6)]
    assert len(committed) == 8, "what was rolled back is counted among what came"


def test_a_rollback_of_an_unknown_transaction_is_ignored() -> None:
    """PostgreSQL 18 sends it for a transaction that it skips because it was rolled back."""
    assembler = Assembler()
    assert feed_all([stream_abort(1, 11), stream_abort(1)], assembler) == []
    (committed,) = feed_all([*PART, STOP, stream_commit(1)], assembler)
    assert rows(committed) == [[1]]


def test_pending_bytes_are_counted_once() -> None:
    assembler = Assembler()
    size = len(framed(add(1, 1)))
    feed_all([start(1), streamed_relation(1), add(1, 1)], assembler)
    before = assembler.pending, assembler.inside
    feed_all([STOP], assembler)
    assert [before, (assembler.pending, assembler.inside)] == [(size, True), (size, False)]
    feed_all([begin(), T, add(2)], assembler)
    assert assembler.pending == size + len(framed(add(2)))


# -- in two phases -------------------------------------------------------------------------------


def test_a_prepared_transaction_is_returned_at_its_commit() -> None:
    assembler = Assembler()
    assert feed_all([begin_prepare(), T, add(1), prepare()], assembler) == []
    assert not assembler.inside
    assert assembler.pending > 0
    others = feed_all([begin(), add(2), commit()], assembler)
    (prepared,) = feed_all([commit_prepared()], assembler)
    assert rows(*others, prepared) == [[2], [1]]
    assert (prepared.commit_lsn, prepared.end_lsn, prepared.time) == (0x30, 0x40, 9)
    assert assembler.pending == 0


def test_a_rolled_back_prepared_transaction_is_discarded() -> None:
    assembler = Assembler()
    messages = [begin_prepare(), T, add(1), prepare(), rollback_prepared()]
    assert feed_all(messages, assembler) == []
    assert assembler.pending == 0
    # Its name may be used again.
    assert len(feed_all([begin_prepare(), prepare(), commit_prepared()], assembler)) == 1


def test_a_streamed_transaction_can_be_prepared() -> None:
    (committed,) = feed_all(
        [
            start(1), streamed_relation(1), add(1, 1), add(2, 11), STOP,
            stream_abort(1, 11),
            prepare(1, kind=b"p"),
            commit_prepared(),
        ]
    )  # fmt: skip
    assert rows(committed) == [[1]]


# -- out of order --------------------------------------------------------------------------------

DISORDER: dict[str, list[bytes]] = {
    "a row outside": [add(1)],
    "a commit outside": [commit()],
    "a truncate outside": [b"T" + struct.pack("!IBI", 1, 0, 16400)],
    "an origin outside": [b"O" + bytes(8) + text("up")],
    "a part ends outside": [STOP],
    "a prepare outside": [prepare()],
    "begin within a transaction": [begin(), begin()],
    "begin within a part": [*PART, begin()],
    "begin prepare within a transaction": [begin(), begin_prepare()],
    "a part begins within a transaction": [begin(), start(1)],
    "a part begins within a part": [*PART, start(2)],
    "a part ends within a transaction": [begin(), STOP],
    "commit within a part": [*PART, commit()],
    "commit at another place": [begin(final=0x1000), commit(0x1008, 0x1030)],
    "commit that ends before it begins": [begin(final=0x1000), commit(0x1000, 0xFFF)],
    "commit of a prepared one": [begin_prepare(), T, commit()],
    "prepare of a plain one": [begin(), T, prepare()],
    "prepare of another one": [begin_prepare(700), T, prepare(701)],
    "prepare within a part": [*PART, prepare(1)],
    "prepared twice": [begin_prepare(), prepare(), begin_prepare(), prepare()],
    "second phase of an unknown one": [commit_prepared("other")],
    "rollback of an unknown prepared one": [rollback_prepared("other")],
    "second phase within a transaction": [begin_prepare(), prepare(), begin(), commit_prepared()],
    "rollback within a transaction": [begin_prepare(), prepare(), begin(), rollback_prepared()],
    "second phase twice": [begin_prepare(), prepare(), commit_prepared(), commit_prepared()],
    "the first part is missing": [start(1, first=False)],
    "the first part twice": [*PART, STOP, start(1)],
    "end of an unknown one": [stream_commit(1)],
    "end of a part's transaction within the part": [*PART, stream_commit(1)],
    "end of another one within a part": [*PART, STOP, start(2), stream_commit(1)],
    "end within a transaction": [*PART, STOP, begin(), stream_commit(1)],
    "end twice": [*PART, STOP, stream_commit(1), stream_commit(1)],
    "abort within the part": [*PART, stream_abort(1)],
    "abort of a subtransaction within the part": [*PART, stream_abort(1, 11)],
    "stream prepare of an unknown one": [prepare(1, kind=b"p")],
    "stream prepare within the part": [*PART, prepare(1, kind=b"p")],
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


def test_a_streamed_row_without_an_xid_is_an_error() -> None:
    (committed,) = feed_all([*PART, b"I\0", STOP, stream_abort(1, 11), stream_commit(1)])
    with pytest.raises(DecodeError, match="truncated"):
        list(committed)


def test_a_body_with_other_messages_than_changes_is_an_error() -> None:
    body = Body()
    body.append(framed(STOP))
    with pytest.raises(DecodeError, match="StreamStop is not a change"):
        list(Committed(1, body, {}, False))


# -- from a real server --------------------------------------------------------------------------


@pytest.fixture
def recorder(postgres_url: str) -> Iterator[Recorder]:
    with Recorder.on(postgres_url) as recorder:
        recorder.run("set logical_decoding_work_mem = '64kB'")
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


VERSIONS = {
    "2, in parts": {"proto_version": "2", "streaming": "on"},
    "3, in parts": {"proto_version": "3", "streaming": "on"},
    "4, whole": {"proto_version": "4"},
    "4, in parts": {"proto_version": "4", "streaming": "on"},
    "4, in parallel": {"proto_version": "4", "streaming": "parallel"},
    "4, in parallel, binary": {"proto_version": "4", "streaming": "parallel", "binary": "true"},
}


@pytest.mark.parametrize("number", range(scaled(20, least=2)))
def test_all_protocol_versions_give_the_same_transactions(
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
    for name, options in VERSIONS.items():
        messages = recorder.peek(slot, messages="true", **options)
        kinds = {bytes(message[:1]) for message in messages}
        assert (kinds >= {b"S", b"E", b"c"}) is ("whole" not in name), name
        for shelf in (Shelf(tmp_path, 1000), Shelf(tmp_path)):
            found = feed_all(messages, Assembler(partial(Body, shelf)))
            # Only in parts can a transaction come of which everything was rolled back.
            assert [told(each) for each in found if any(each)] == wanted, name


def test_an_abort_has_its_lsn_only_in_parallel_mode(recorder: Recorder) -> None:
    recorder.run("create table t (id int)")
    slot = recorder.slot()
    # One that is rolled back as a whole is not streamed if the server knows that already.
    recorder.transaction(
        "insert into t select generate_series(1, 5000)",
        "savepoint a",
        "insert into t select generate_series(1, 5000)",
        "rollback to a",
        "insert into t values (0)",
    )
    sizes = {}
    for mode in ("on", "parallel"):
        messages = recorder.peek(slot, proto_version="4", streaming=mode)
        aborts = {len(message) for message in messages if message[:1] == b"A"}
        sizes[mode] = aborts
        (committed,) = feed_all(messages)
        assert sum(1 for _ in committed) == 5001
    assert sizes == {"on": {9}, "parallel": {25}}


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
        for options in ({"proto_version": "1"}, {"proto_version": "2", "streaming": "on"}):
            found = recorder.transactions(slot, **options)
            assert [(each.origin, len(each)) for each in found] == [
                (None, 1),
                ("upstream", 1),
                ("upstream", 5000),
                (None, 1),
            ]
    finally:
        recorder.run("select pg_replication_origin_drop('upstream')")


def test_types_that_are_not_built_in_are_described_by_name(recorder: Recorder) -> None:
    recorder.run("create schema shop", "create type shop.mood as enum ('happy')")
    recorder.run("create table t (id int, mood shop.mood)")
    slot = recorder.slot()
    recorder.run("insert into t values (1, 'happy')")
    assembler = Assembler()
    (committed,) = feed_all(recorder.peek(slot), assembler)
    (change,) = committed
    assert isinstance(change, Insert)
    assert change.new == {"id": 1, "mood": "happy"}
    assert assembler.type_names[change.relation.columns[1].type_oid] == "shop.mood"


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


def test_prepared_transactions_of_a_real_server() -> None:
    options = {"max_prepared_transactions": "10"}
    with SyncEmbeddedPostgres(options=options) as server, Recorder.on(server.url) as recorder:
        recorder.run("set logical_decoding_work_mem = '64kB'", "create table t (id int)")
        plain, slot = recorder.slot(), recorder.slot(two_phase=True)
        for number, (size, end) in enumerate(
            [(1, "commit"), (1, "rollback"), (5000, "commit"), (5000, "rollback")]
        ):
            with psycopg.connect(server.url) as other:
                other.execute("insert into t select generate_series(1, %s)", [size])
                other.execute(f"prepare transaction 'gid{number}'".encode())
            recorder.run("insert into t values (0)")
            recorder.connection.execute(f"{end} prepared 'gid{number}'".encode())
        wanted = [told(committed) for committed in recorder.transactions(plain)]
        assert [len(changes) for *_, changes in wanted] == [1, 1, 1, 1, 5000, 1]
        kinds = set()
        for version in (
            {"proto_version": "3", "two_phase": "on"},
            {"proto_version": "3", "two_phase": "on", "streaming": "on"},
            {"proto_version": "4", "two_phase": "on", "streaming": "parallel"},
        ):
            messages = recorder.peek(slot, **version)
            kinds |= {bytes(message[:1]) for message in messages}
            assembler = Assembler()
            assert [told(each) for each in feed_all(messages, assembler)] == wanted
            assert assembler.pending == 0
        assert kinds >= {b"b", b"P", b"K", b"r", b"p", b"S", b"E"}
