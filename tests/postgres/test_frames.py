"""The bytes of a socket are split into messages, however they are received."""

from __future__ import annotations

import struct
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.postgres import DecodeError
from moored.postgres.stream import _frames
from moored.postgres.stream._frames import CopyFrames, framed
from moored.testing import scaled

pytestmark = pytest.mark.pure

often = settings(max_examples=scaled(1_000, least=20), deadline=None)
contents = st.lists(st.binary(max_size=300), max_size=20)


def other(kind: bytes, content: bytes = b"") -> bytes:
    """A message that is not of the stream."""
    return kind + struct.pack("!I", len(content) + 4) + content


def fields(**words: str) -> bytes:
    """What an error or a notice holds."""
    return b"".join(f"{key}{word}".encode() + b"\0" for key, word in words.items()) + b"\0"


def in_pieces(data: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(cuts)]


@often
@given(contents, st.lists(st.integers(min_value=0), max_size=30), st.sampled_from([6, 20, 2**20]))
def test_messages_do_not_depend_on_how_the_bytes_are_split(
    messages: list[bytes], places: list[int], long: int
) -> None:
    line = b"".join(map(framed, messages))
    frames = CopyFrames()
    with mock.patch.object(_frames, "_LONG", long):
        found = [message for piece in in_pieces(line, places) for message in frames.cut(piece)]
    assert found == messages
    assert frames.ended is None


@often
@given(st.binary(max_size=100), st.lists(st.integers(min_value=0), max_size=10))
def test_random_bytes_are_messages_or_a_decode_error(data: bytes, places: list[int]) -> None:
    whole, parts = CopyFrames(), CopyFrames()
    try:
        wanted = whole.cut(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            _ = [parts.cut(piece) for piece in in_pieces(data, places)]
        return
    assert [message for piece in in_pieces(data, places) for message in parts.cut(piece)] == wanted
    assert parts.ended == whole.ended


def test_a_long_message_is_assembled() -> None:
    message = bytes(range(256)) * 20_000
    line, frames = framed(message) + framed(b"after"), CopyFrames()
    pieces = [line[at : at + 10_000] for at in range(0, len(line), 10_000)]
    assert [found for piece in pieces for found in frames.cut(piece)] == [message, b"after"]


def test_an_error_ends_the_stream_after_the_messages_before_it() -> None:
    frames = CopyFrames()
    said = fields(S="FATAL", C="57P01", M="terminating connection due to administrator command")
    assert frames.cut(framed(b"last") + other(b"E", said)) == [b"last"]
    assert frames.ended == "terminating connection due to administrator command"


def test_the_server_may_end_the_stream_without_an_error() -> None:
    frames = CopyFrames()
    assert frames.cut(other(b"c") + other(b"C", b"COPY 0\0") + other(b"Z", b"I")) == []
    assert frames.ended == "the server ended the stream"


def test_notices_and_parameters_are_not_messages() -> None:
    frames = CopyFrames()
    line = other(b"S", b"TimeZone\0UTC\0") + other(b"N", fields(C="55000", M="skipped"))
    assert frames.cut(line + framed(b"next")) == [b"next"]
    assert frames.notice == ("55000", "skipped")
    assert frames.ended is None


@pytest.mark.parametrize(
    "line",
    [b"d\0\0\0\3abc", b"d\0\0\0\0", b"d\xff\xff\xff\xff", b"d\x40\0\0\1", other(b"q")],
    ids=["short", "empty", "endless", "too long", "unknown"],
)
def test_an_invalid_frame_is_an_error(line: bytes) -> None:
    frames = CopyFrames()
    with pytest.raises(DecodeError, match="message of"):
        frames.cut(framed(b"before") + line)
