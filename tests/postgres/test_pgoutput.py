"""Every message of pgoutput, byte by byte as documented, and invalid messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.postgres.recording import relation

from moored.postgres import Column, DecodeError, Lsn, Relation, ReplicaIdentity
from moored.postgres.decode._pgoutput import (
    LogicalMessage,
    Message,
    Origin,
    TruncateMessage,
    parse,
    time_of,
)

pytestmark = pytest.mark.pure

LSN = Lsn(0x16_B374D848)
PLACE = bytes.fromhex("00000016B374D848")

#: Bytes, and what they say.
MESSAGES: dict[str, tuple[bytes, Message]] = {
    "origin": (b"O" + PLACE + b"upstr\xc3\xa9am\0", Origin("upstréam")),
    "type": (b"Y\x00\x00\x40\x01public\0mood\0", None),
    "type of the catalogue": (b"Y\x00\x00\x00\x17\0int4\0", None),
    "truncate": (
        b"T\x00\x00\x00\x02\x03\x00\x00\x40\x01\x00\x00\x40\x02",
        TruncateMessage((16385, 16386), cascade=True, restart_identity=True),
    ),
    "truncate cascade": (
        b"T\x00\x00\x00\x01\x01\x00\x00\x40\x01",
        TruncateMessage((16385,), cascade=True, restart_identity=False),
    ),
    "truncate restart identity": (
        b"T\x00\x00\x00\x01\x02\x00\x00\x40\x01",
        TruncateMessage((16385,), cascade=False, restart_identity=True),
    ),
    "logical message": (
        b"M\x01" + PLACE + b"app\0\x00\x00\x00\x03a\0b",
        LogicalMessage(True, LSN, "app", b"a\0b"),
    ),
    "logical message without a transaction": (
        b"M\x00" + PLACE + b"\0\x00\x00\x00\x00",
        LogicalMessage(False, LSN, "", b""),
    ),
}
RELATION = (
    b"R\x00\x00\x40\x01public\0orders\0f\x00\x02"
    b"\x01id\0\x00\x00\x00\x14\xff\xff\xff\xff"
    b"\x00name\0\x00\x00\x04\x13\x00\x00\x00\x18"
)
#: Messages of rows are read elsewhere; a relation cannot be compared.
ALL = {name: data for name, (data, _) in MESSAGES.items()} | {"relation": RELATION}
every_message = pytest.mark.parametrize("data", ALL.values(), ids=ALL)


@pytest.mark.parametrize(("data", "wanted"), MESSAGES.values(), ids=MESSAGES)
def test_each_message_is_parsed(data: bytes, wanted: Message) -> None:
    message = parse(data, 0)
    assert type(message) is type(wanted)
    assert message == wanted


def test_every_kind_of_message_has_a_sample() -> None:
    """All first bytes of version 1, but those of begin, commit and rows."""
    assert {data[:1] for data in ALL.values()} == {bytes([byte]) for byte in b"ORYTM"}


def test_a_relation_has_its_columns() -> None:
    found = parse(RELATION, 0)
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
    found = parse(relation([("id", 20)], identity=letter), 0)
    assert isinstance(found, Relation)
    assert found.identity is identity


def test_a_table_of_the_catalogue_has_no_schema_in_its_message() -> None:
    found = parse(relation([], schema="", name="pg_class"), 0)
    assert isinstance(found, Relation)
    assert found.qualified == "pg_catalog.pg_class"
    assert found.columns == ()


@pytest.mark.parametrize(("data", "wanted"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_may_begin_at_any_offset(data: bytes, wanted: Message) -> None:
    assert parse(b"before" + data, 6) == wanted


@every_message
def test_every_truncated_message_is_an_error(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(DecodeError):
            parse(data[:size], 0)


@every_message
def test_every_message_with_extra_bytes_is_an_error(data: bytes) -> None:
    for extra in (b"\0", b"\0" * 5, b"x" * 100):
        with pytest.raises(DecodeError):
            parse(data + extra, 0)


def test_only_known_first_bytes_are_messages() -> None:
    known = {data[0] for data in ALL.values()}
    for byte in set(range(256)) - known:
        with pytest.raises(DecodeError, match=f"{byte:#04x}"):
            parse(bytes([byte]) + bytes(60), 0)


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(DecodeError, match="is empty"):
        parse(b"", 0)


@pytest.mark.parametrize(
    "data",
    [
        b"O" + PLACE + b"\xff\0",
        b"Y\x00\x00\x40\x01\xc3\0mood\0",
        b"Y\x00\x00\x40\x01public\0\x80\0",
        b"M\x01" + PLACE + b"\xff\0\x00\x00\x00\x00",
        b"R\x00\x00\x40\x01public\0\xfe\0d\x00\x00",
    ],
)
def test_a_string_that_is_not_utf_8_is_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match="not UTF-8"):
        parse(data, 0)


def test_an_unterminated_string_is_an_error() -> None:
    with pytest.raises(DecodeError, match="is not terminated"):
        parse(b"O" + PLACE + b"upstream", 0)


def test_an_unknown_replica_identity_is_an_error() -> None:
    with pytest.raises(DecodeError, match="unknown replica identity 0x78"):
        parse(relation([("id", 20)], identity=b"x"), 0)


def test_two_columns_of_the_same_name_are_an_error() -> None:
    with pytest.raises(DecodeError, match="two columns of the same name"):
        parse(relation([("id", 20), ("id", 25)]), 0)


def test_counts_beyond_the_message_are_errors() -> None:
    """They neither allocate memory nor wait for more bytes."""
    for data in (
        b"T\xff\xff\xff\xff\x00\x00\x00\x40\x01",
        b"M\x01" + PLACE + b"app\0\xff\xff\xff\xffx",
        b"R\x00\x00\x40\x01public\0t\0d\xff\xff",
    ):
        with pytest.raises(DecodeError, match="truncated"):
            parse(data, 0)


def test_a_timestamp_outside_of_the_calendar_is_an_error() -> None:
    with pytest.raises(DecodeError, match="is not a valid timestamp"):
        time_of(-(2**63))


@given(st.integers(-(10**15), 10**15))
def test_timestamps_are_converted(microseconds: int) -> None:
    assert (time_of(microseconds) - time_of(0)).total_seconds() * 1_000_000 == pytest.approx(
        microseconds
    )
