"""Keepalives and status updates, byte by byte; and LSNs."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.postgres import DecodeError, Lsn
from moored.postgres._lsn import LAST
from moored.postgres.decode._wire import KEEPALIVE, PrimaryKeepalive, read_keepalive, status_update
from moored.postgres.stream._positions import Positions

pytestmark = pytest.mark.pure

places = st.integers(0, LAST)


# -- status updates ------------------------------------------------------------------------------


def test_a_status_update_byte_by_byte() -> None:
    """r, received + 1, flushed + 1, applied = flushed + 1, µs since 2000, and no reply wanted."""
    wall = datetime(2001, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC).timestamp()
    assert status_update(0x16_B374D847, 0x16_B374D7FF, wall) == bytes.fromhex(
        "72"
        "00000016 B374D848"
        "00000016 B374D800"
        "00000016 B374D800"
        "00001CC2 AA022360"
        "00"
    )  # fmt: skip


def test_a_status_update_may_request_a_reply() -> None:
    quiet = status_update(1, 0, 0.0)
    assert len(quiet) == 34
    assert status_update(1, 0, 0.0, reply=True) == quiet[:-1] + b"\1"


@given(places.filter(lambda place: place < LAST), places.filter(lambda place: place < LAST))
def test_a_status_update_of_every_lsn(received: int, flushed: int) -> None:
    kind, *places, time, reply = struct.unpack("!cQQQqB", status_update(received, flushed, 1e9))
    assert (kind, reply) == (b"r", 0)
    assert places == [received + 1, flushed + 1, flushed + 1]
    assert time == (1_000_000_000 - 946_684_800) * 1_000_000


def test_positions_are_sent_plus_one() -> None:
    positions = Positions(0x100)
    positions.committed(0x180)
    positions.committed(0x200)
    positions.acknowledged(0x180)
    assert positions.status(946_684_801.25) == bytes.fromhex(
        "72 0000000000000200 0000000000000180 0000000000000180 00000000001312D0 00"
    )


def test_before_any_message_the_status_is_the_confirmed_lsn() -> None:
    """The status repeats the slot's confirmed LSN exactly."""
    for place in (0, 1, 0x1000, LAST):
        _, *told, _, _ = struct.unpack("!cQQQqB", Positions(place).status(0.0))
        assert told == [place] * 3


# -- keepalives and data -------------------------------------------------------------------------


def test_a_keepalive_byte_by_byte() -> None:
    data = bytes.fromhex("6B 00000016B374D848 00001CC2A9EB4000 01")
    assert data[0] == KEEPALIVE
    assert read_keepalive(data) == PrimaryKeepalive(Lsn(0x16_B374D848), reply=True)
    assert read_keepalive(data[:-1] + b"\0") == PrimaryKeepalive(Lsn(0x16_B374D848), reply=False)


@given(places, st.booleans())
def test_keepalives_of_every_lsn(end: int, reply: bool) -> None:
    data = struct.pack("!cQqB", b"k", end, -5, reply)
    assert read_keepalive(data) == (end, reply)
    assert isinstance(read_keepalive(data).end, Lsn)


@pytest.mark.parametrize("size", [*range(18), 19, 25])
def test_a_keepalive_of_the_wrong_size_is_an_error(size: int) -> None:
    with pytest.raises(DecodeError, match=f"has {size} bytes instead of 18"):
        read_keepalive((b"k" + bytes(30))[:size])


# -- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [("0/0", 0), ("16/B374D848", 0x16_B374D848), ("FFFFFFFF/FFFFFFFF", LAST), ("1/2", 2**32 + 2)],
)
def test_lsns_are_written_as_the_server_writes_them(text: str, place: int) -> None:
    assert Lsn.parse(text) == place
    assert str(Lsn(place)) == text
    assert repr(Lsn(place)) == f"Lsn('{text}')"


@given(places)
def test_every_lsn_can_be_written_and_parsed(place: int) -> None:
    assert Lsn.parse(str(Lsn(place))) == place


@pytest.mark.parametrize(
    "text", ["", "0", "/", "1/", "/1", "G/0", "0/0/0", " 0/0", "0/0\n", "123456789/0", "-1/0"]
)
def test_an_invalid_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid LSN"):
        Lsn.parse(text)
