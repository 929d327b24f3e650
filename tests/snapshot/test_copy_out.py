"""The rows of a COPY are found in the bytes of the server, however they arrive."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.postgres import DecodeError
from moored.postgres.snapshot._copy_out import CopyRows

pytestmark = pytest.mark.pure

#: What follows the rows is for libpq: CommandComplete and ReadyForQuery.
AFTER = b"C\0\0\0\x0bCOPY 3\0Z\0\0\0\x05T"


def message(kind: bytes, content: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(content) + 4) + content


#: Rows as COPY writes them: a newline at the end and nowhere else, and no zero byte.
rows = st.lists(
    st.binary(max_size=3000).map(lambda row: row.replace(b"\n", b"").replace(b"\0", b"") + b"\n"),
    max_size=20,
)


@given(rows, st.lists(st.integers(1, 9000), min_size=1), st.booleans(), st.booleans())
def test_rows_are_found_in_any_pieces(
    wanted: list[bytes], sizes: list[int], failed: bool, noticed: bool
) -> None:
    notice = message(b"N", b"SNOTICE\0Mhello\0\0") if noticed else b""
    end = message(b"E", b"SERROR\0\0") if failed else message(b"c")
    data = message(b"H", b"\0\0\0") + notice.join(message(b"d", row) for row in wanted) + end
    socket, found = bytearray(data + AFTER), CopyRows()
    step = 0
    while not found.ended:
        # A peek shows what has arrived; what was not taken is shown again, with more.
        step += sizes[step % len(sizes)]
        taken = found.take(bytes(socket[:step]))
        del socket[:taken]
        step -= taken
    assert b"".join(found.parts) == b"".join(wanted)
    assert not found.missing
    assert bytes(socket) == (end + AFTER if failed else AFTER)


def test_a_row_that_is_longer_than_one_read_is_taken_in_parts() -> None:
    found, row = CopyRows(), b"x" * 100_000 + b"\n"
    data = message(b"d", row)
    assert found.take(data[:400]) == 400
    assert found.missing == len(data) - 400
    assert found.take(data[400:]) == len(data) - 400
    assert (b"".join(found.parts), found.missing) == (row, 0)


def test_bytes_that_are_no_messages_are_refused() -> None:
    with pytest.raises(DecodeError, match="set gssencmode=disable"):
        CopyRows().take(b"\x17\x03\x03\0\x20" + bytes(32))
