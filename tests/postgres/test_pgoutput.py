"""Every message of pgoutput, byte by byte as documented, and invalid messages."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.postgres.recording import begin, commit, relation, text

from moored.postgres import Column, DecodeError, Lsn, Relation, ReplicaIdentity
from moored.postgres.decode._pgoutput import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    TruncateMessage,
    TypeName,
    parse,
    time_of,
)

pytestmark = pytest.mark.pure

#: 2001-01-01, in microseconds since 2000, and as a time.
YEAR = 366 * 86_400_000_000
NEW_YEAR = datetime(2001, 1, 1, tzinfo=UTC)
LSN, END = Lsn(0x16_B374D848), Lsn(0x16_B374D900)
PLACES = bytes.fromhex("00000016B374D848 00000016B374D900")
TIME = bytes.fromhex("00001CC2A9EB4000")
XID = bytes.fromhex("000002DA")

#: Bytes, whether within a part of a transaction, and what they say.
MESSAGES: dict[str, tuple[bytes, bool, Message]] = {
    "begin": (b"B" + PLACES[:8] + TIME + XID, False, Begin(LSN, YEAR, 730)),
    "commit": (b"C\x00" + PLACES + TIME, False, Commit(LSN, END, YEAR)),
    "origin": (b"O" + PLACES[:8] + b"upstr\xc3\xa9am\0", False, Origin(LSN, "upstréam")),
    "type": (
        b"Y\x00\x00\x40\x01public\0mood\0",
        False,
        TypeName(None, 16385, "public", "mood"),
    ),
    "type of the catalogue": (
        b"Y\x00\x00\x00\x17\0int4\0",
        False,
        TypeName(None, 23, "pg_catalog", "int4"),
    ),
    "type, streamed": (
        b"Y" + XID + b"\x00\x00\x40\x01public\0mood\0",
        True,
        TypeName(730, 16385, "public", "mood"),
    ),
    "truncate": (
        b"T\x00\x00\x00\x02\x03\x00\x00\x40\x01\x00\x00\x40\x02",
        False,
        TruncateMessage(None, (16385, 16386), cascade=True, restart_identity=True),
    ),
    "truncate cascade": (
        b"T\x00\x00\x00\x01\x01\x00\x00\x40\x01",
        False,
        TruncateMessage(None, (16385,), cascade=True, restart_identity=False),
    ),
    "truncate restart identity": (
        b"T\x00\x00\x00\x01\x02\x00\x00\x40\x01",
        False,
        TruncateMessage(None, (16385,), cascade=False, restart_identity=True),
    ),
    "truncate, streamed": (
        b"T" + XID + b"\x00\x00\x00\x01\x00\x00\x00\x40\x01",
        True,
        TruncateMessage(730, (16385,), cascade=False, restart_identity=False),
    ),
    "logical message": (
        b"M\x01" + PLACES[:8] + b"app\0\x00\x00\x00\x03a\0b",
        False,
        LogicalMessage(None, True, LSN, "app", b"a\0b"),
    ),
    "logical message without a transaction": (
        b"M\x00" + PLACES[:8] + b"\0\x00\x00\x00\x00",
        False,
        LogicalMessage(None, False, LSN, "", b""),
    ),
    "logical message, streamed": (
        b"M" + XID + b"\x01" + PLACES[:8] + b"app\0\x00\x00\x00\x01x",
        True,
        LogicalMessage(730, True, LSN, "app", b"x"),
    ),
    "stream start": (b"S" + XID + b"\x01", False, StreamStart(730, first=True)),
    "stream start again": (b"S" + XID + b"\x00", False, StreamStart(730, first=False)),
    "stream stop": (b"E", True, StreamStop()),
    "stream commit": (
        b"c" + XID + b"\x00" + PLACES + TIME,
        False,
        StreamCommit(730, LSN, END, YEAR),
    ),
    "stream abort": (b"A" + XID + b"\x00\x00\x02\xdb", False, StreamAbort(730, 731)),
    "stream abort with its place": (
        b"A" + XID + b"\x00\x00\x02\xdb" + PLACES[:8] + TIME,
        False,
        StreamAbort(730, 731, LSN, NEW_YEAR),
    ),
    "begin prepare": (
        b"b" + PLACES + TIME + XID + b"gid\0",
        False,
        BeginPrepare(LSN, END, NEW_YEAR, 730, "gid"),
    ),
    "prepare": (
        b"P\x00" + PLACES + TIME + XID + b"gid\0",
        False,
        Prepare(LSN, END, NEW_YEAR, 730, "gid"),
    ),
    "commit prepared": (
        b"K\x00" + PLACES + TIME + XID + b"gid\0",
        False,
        CommitPrepared(LSN, END, YEAR, 730, "gid"),
    ),
    "rollback prepared": (
        b"r\x00" + PLACES + TIME + bytes(8) + XID + b"gid\0",
        False,
        RollbackPrepared(LSN, END, NEW_YEAR, datetime(2000, 1, 1, tzinfo=UTC), 730, "gid"),
    ),
    "stream prepare": (
        b"p\x00" + PLACES + TIME + XID + b"gid\0",
        False,
        StreamPrepare(LSN, END, NEW_YEAR, 730, "gid"),
    ),
}
RELATION = (
    b"R\x00\x00\x40\x01public\0orders\0f\x00\x02"
    b"\x01id\0\x00\x00\x00\x14\xff\xff\xff\xff"
    b"\x00name\0\x00\x00\x04\x13\x00\x00\x00\x18"
)
#: Messages of rows are read elsewhere; a relation cannot be compared.
ALL = {name: (data, streamed) for name, (data, streamed, _) in MESSAGES.items()} | {
    "relation": (RELATION, False),
    "relation, streamed": (RELATION[:1] + XID + RELATION[1:], True),
}
every_message = pytest.mark.parametrize(("data", "streamed"), ALL.values(), ids=ALL)


@pytest.mark.parametrize(("data", "streamed", "wanted"), MESSAGES.values(), ids=MESSAGES)
def test_each_message_is_parsed(data: bytes, streamed: bool, wanted: Message) -> None:
    message = parse(data, 0, streamed=streamed)
    assert type(message) is type(wanted)
    assert message == wanted


def test_every_kind_of_message_has_a_sample() -> None:
    """All first bytes that the documentation knows, but those of rows."""
    assert {data[:1] for data, _ in ALL.values()} == {bytes([byte]) for byte in b"BCORYTMSEcAbPKrp"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_relation_has_its_columns(streamed: bool) -> None:
    data = RELATION[:1] + XID + RELATION[1:] if streamed else RELATION
    found = parse(data, 0, streamed=streamed)
    assert isinstance(found, Relation)
    assert (found.oid, found.schema, found.name) == (16385, "public", "orders")
    assert found.qualified == "public.orders"
    assert found.identity is ReplicaIdentity.FULL
    assert found.columns == (Column("id", 20, -1, True), Column("name", 1043, 24, False))
    assert found.names == ("id", "name")
    assert repr(found) == "<Relation public.orders (id, name)>"


@pytest.mark.parametrize(
    ("letter", "identity"),
    [
        (b"d", ReplicaIdentity.DEFAULT),
        (b"n", ReplicaIdentity.NOTHING),
        (b"f", ReplicaIdentity.FULL),
        (b"i", ReplicaIdentity.INDEX),
    ],
)
def test_every_replica_identity_is_parsed(letter: bytes, identity: ReplicaIdentity) -> None:
    found = parse(relation([("id", 20)], identity=letter), 0, streamed=False)
    assert isinstance(found, Relation)
    assert found.identity is identity


def test_a_table_of_the_catalogue_has_no_schema_in_its_message() -> None:
    found = parse(relation([], schema="", name="pg_class"), 0, streamed=False)
    assert isinstance(found, Relation)
    assert found.qualified == "pg_catalog.pg_class"
    assert found.columns == ()


@pytest.mark.parametrize(("data", "streamed", "wanted"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_may_begin_at_any_offset(data: bytes, streamed: bool, wanted: Message) -> None:
    assert parse(b"before" + data, 6, streamed=streamed) == wanted


@every_message
def test_every_truncated_message_is_an_error(data: bytes, streamed: bool) -> None:
    # An abort without its place is a shorter message, not a broken one.
    complete = {9} if data[:1] == b"A" else set()
    for size in set(range(len(data))) - complete:
        with pytest.raises(DecodeError):
            parse(data[:size], 0, streamed=streamed)


@every_message
def test_every_message_with_extra_bytes_is_an_error(data: bytes, streamed: bool) -> None:
    for extra in (b"\0", b"\0" * 5, b"x" * 100):
        with pytest.raises(DecodeError):
            parse(data + extra, 0, streamed=streamed)


def test_only_known_first_bytes_are_messages() -> None:
    known = {data[0] for data, _ in ALL.values()}
    for byte in set(range(256)) - known:
        with pytest.raises(DecodeError, match=f"{byte:#04x}"):
            parse(bytes([byte]) + bytes(60), 0, streamed=False)


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(DecodeError, match="is empty"):
        parse(b"", 0, streamed=False)


@pytest.mark.parametrize(
    "data",
    [
        b"O" + PLACES[:8] + b"\xff\0",
        b"Y\x00\x00\x40\x01\xc3\0mood\0",
        b"Y\x00\x00\x40\x01public\0\x80\0",
        b"M\x01" + PLACES[:8] + b"\xff\0\x00\x00\x00\x00",
        b"b" + PLACES + TIME + XID + b"\xff\0",
        b"R\x00\x00\x40\x01public\0\xfe\0d\x00\x00",
    ],
)
def test_a_string_that_is_not_utf_8_is_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match="not UTF-8"):
        parse(data, 0, streamed=False)


def test_an_unterminated_string_is_an_error() -> None:
    with pytest.raises(DecodeError, match="is not terminated"):
        parse(b"O" + PLACES[:8] + b"upstream", 0, streamed=False)


def test_an_unknown_replica_identity_is_an_error() -> None:
    with pytest.raises(DecodeError, match="unknown replica identity 0x78"):
        parse(relation([("id", 20)], identity=b"x"), 0, streamed=False)


def test_two_columns_of_the_same_name_are_an_error() -> None:
    with pytest.raises(DecodeError, match="two columns of the same name"):
        parse(relation([("id", 20), ("id", 25)]), 0, streamed=False)


def test_counts_beyond_the_message_are_errors() -> None:
    """They neither allocate memory nor wait for more bytes."""
    for data in (
        b"T\xff\xff\xff\xff\x00\x00\x00\x40\x01",
        b"M\x01" + PLACES[:8] + b"app\0\xff\xff\xff\xffx",
        b"R\x00\x00\x40\x01public\0t\0d\xff\xff",
    ):
        with pytest.raises(DecodeError, match="truncated"):
            parse(data, 0, streamed=False)


def test_a_timestamp_outside_of_the_calendar_is_an_error() -> None:
    with pytest.raises(DecodeError, match="is not a valid timestamp"):
        parse(b"b" + PLACES + b"\x7f" + b"\xff" * 7 + XID + b"gid\0", 0, streamed=False)
    with pytest.raises(DecodeError, match="is not a valid timestamp"):
        time_of(-(2**63))


@given(st.integers(-(10**15), 10**15))
def test_timestamps_are_converted(microseconds: int) -> None:
    assert (time_of(microseconds) - time_of(0)).total_seconds() * 1_000_000 == pytest.approx(
        microseconds
    )


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
)
def test_begins_and_commits_of_every_size(lsn: int, end: int, time: int, xid: int) -> None:
    assert parse(begin(xid, lsn, time), 0, streamed=False) == Begin(lsn, time, xid)
    assert parse(commit(lsn, end, time), 0, streamed=False) == Commit(lsn, end, time)


@given(
    st.integers(0, 2**32 - 1),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
)
def test_names_of_every_kind(oid: int, schema: str, name: str) -> None:
    data = b"Y" + struct.pack("!I", oid) + text(schema) + text(name)
    wanted = TypeName(None, oid, schema or "pg_catalog", name)
    assert parse(data, 0, streamed=False) == wanted
