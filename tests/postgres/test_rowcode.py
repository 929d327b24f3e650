"""Generated code and general code read rows alike."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.postgres.recording import NULL, TOAST, Value, binary, row, texts

from moored.postgres import UNCHANGED, Column, DecodeError, Relation, ReplicaIdentity
from moored.postgres.decode import _rows as rows_module
from moored.postgres.decode._rowcode import MOST_COLUMNS
from moored.testing import scaled

pytestmark = pytest.mark.pure

often = settings(
    max_examples=scaled(1_000, least=20),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
INT4, INT8, TEXT, NUMERIC, TIMESTAMPTZ, INT4S, BOOL = 23, 20, 25, 1700, 1184, 1007, 16
TYPES = (INT8, INT4, NUMERIC, TEXT, TIMESTAMPTZ, INT4S, BOOL)

#: One row in each form, with a value in every column.
AS_TEXT = texts("1", "-2", "12.50", "é", "2026-01-02 03:04:05.678+00", "{1,NULL,3}", "t")
AS_BINARY = [
    binary(struct.pack("!q", 1)),
    binary(struct.pack("!i", -2)),
    binary(struct.pack("!hhhhhh", 2, 0, 0, 2, 12, 5000)),
    binary("é".encode()),
    binary(struct.pack("!q", 820_638_245_678_000)),
    binary(struct.pack("!iiIiiiiii", 1, 1, 23, 2, 1, 4, 1, 4, 3)),
    binary(b"\1"),
]


def table(*types: int, names: list[str] | None = None) -> Relation:
    names = names or [f"c{n}" for n in range(len(types))]
    columns = [Column(*each, -1, False) for each in zip(names, types, strict=True)]
    return Relation(16400, "public", "t", ReplicaIdentity.DEFAULT, columns)


def written(sample: list[Value], *types: int, names: list[str] | None = None) -> Relation:
    """A table whose code was generated for rows like this one."""
    relation = table(*types, names=names)
    for _ in range(rows_module._ENOUGH):
        relation.whole(b"N" + row(sample), 0)
    assert relation.whole != relation._whole
    assert relation.row != relation._row
    return relation


def outcome(read: Any, data: bytes, at: int) -> str:
    """Return the repr of the row, or that it is an error."""
    try:
        return repr(read(data, at))
    except (DecodeError, IndexError, struct.error):
        return "an error"


def check_the_same(known: Relation, data: bytes) -> None:
    """Check that generated and general code agree about a row, at both offsets."""
    fresh = table(*(column.type_oid for column in known.columns))
    assert outcome(known.whole, data, 0) == outcome(fresh._whole, data, 0)
    after = data[1:] + b"after"
    assert outcome(known.row, after, 0) == outcome(fresh._row, after, 0)


@pytest.mark.parametrize("sample", [AS_TEXT, AS_BINARY], ids=["text", "binary"])
def test_a_usual_row_is_read_by_generated_code(sample: list[Value]) -> None:
    relation = written(sample, *TYPES)
    check_the_same(relation, b"N" + row(sample))
    found = relation.whole(b"N" + row(sample), 0)
    assert list(found) == list(relation.names)
    assert found["c4"] == datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


@pytest.mark.parametrize("sample", [AS_TEXT, AS_BINARY], ids=["text", "binary"])
@often
@given(choices=st.lists(st.integers(0, 3), min_size=len(TYPES), max_size=len(TYPES)))
def test_generated_and_general_code_agree_on_valid_rows(
    sample: list[Value], choices: list[int]
) -> None:
    relation = written(sample, *TYPES)
    forms = zip(choices, AS_TEXT, AS_BINARY, strict=True)
    values = [(NULL, TOAST, text, data)[choice] for choice, text, data in forms]
    for _ in range(5):  # the code may be written anew in between
        check_the_same(relation, b"N" + row(values))
        check_the_same(relation, b"N" + row(sample))


@pytest.mark.parametrize("sample", [AS_TEXT, AS_BINARY], ids=["text", "binary"])
@often
@given(data=st.data())
def test_generated_and_general_code_agree_on_changed_bytes(
    sample: list[Value], data: st.DataObject
) -> None:
    relation = written(sample, *TYPES)
    message = bytearray(b"N" + row(sample))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    check_the_same(relation, bytes(message))


@pytest.mark.parametrize("sample", [AS_TEXT, AS_BINARY], ids=["text", "binary"])
def test_truncated_and_extended_rows_are_errors(sample: list[Value]) -> None:
    relation = written(sample, *TYPES)
    message = b"N" + row(sample)
    for size in range(len(message)):
        with pytest.raises((DecodeError, IndexError, struct.error)):
            relation.whole(message[:size], 0)
    with pytest.raises(DecodeError, match="1 extra bytes"):
        relation.whole(message + b"x", 0)


@pytest.mark.parametrize("sample", [AS_TEXT, AS_BINARY], ids=["text", "binary"])
@pytest.mark.parametrize("names", [(), ("c0",), ("c1", "c4"), ("c6",), ("c0", "c9")])
@often
@given(choices=st.lists(st.integers(0, 3), min_size=len(TYPES), max_size=len(TYPES)))
def test_only_the_chosen_columns_of_a_row_are_read(
    sample: list[Value], names: tuple[str, ...], choices: list[int]
) -> None:
    full = table(*TYPES)
    chosen = full.only(names)
    assert chosen is full.only(names)
    forms = zip(choices, AS_TEXT, AS_BINARY, strict=True)
    values = [(NULL, TOAST, text, data)[choice] for choice, text, data in forms]
    for each in (sample, sample, sample, values, sample, values):
        data = row(each)
        expected = {k: v for k, v in full.whole(b"N" + data, 0).items() if k in names}
        assert chosen.whole(b"N" + data, 0) == expected
        assert chosen.row(data + b"after", 0) == (expected, len(data))


def test_a_value_that_is_not_read_is_not_loaded() -> None:
    chosen = table(INT4, INT4).only(("c0",))
    for _ in range(5):
        assert chosen.whole(b"N" + row(texts("1", "not a number")), 0) == {"c0": 1}


def test_column_names_cannot_inject_code() -> None:
    names = ["a'b", 'c"d', "e\\f", "g\nh", "class", "{x}", "); raise SystemExit("]
    relation = written(AS_TEXT, *TYPES, names=names)
    assert list(relation.whole(b"N" + row(AS_TEXT), 0)) == names


def test_an_unrepresentable_value_is_a_string_also_in_later_rows() -> None:
    relation = written(texts("1", "2026-01-01 00:00:00+00"), INT4, TIMESTAMPTZ)
    for _ in range(5):
        assert relation.whole(b"N" + row(texts("2", "infinity")), 0) == {"c0": 2, "c1": "infinity"}
    assert relation._lenient
    found = relation.whole(b"N" + row(texts("3", "2026-01-01 00:00:00+00")), 0)
    assert found == {"c0": 3, "c1": datetime(2026, 1, 1, tzinfo=UTC)}


def test_an_unsent_value_is_unchanged() -> None:
    relation = written(texts("1", "a"), INT4, TEXT)
    assert relation.whole(b"N" + row([*texts("1"), TOAST]), 0) == {"c0": 1, "c1": UNCHANGED}


def test_code_is_generated_a_limited_number_of_times() -> None:
    relation = written(texts(*"123456789"), *[INT4] * 9)
    four = binary(struct.pack("!i", 4))
    for place in (*range(9), *range(9)):
        values = texts(*"123456789")
        values[place] = four
        assert relation.whole(b"N" + row(values), 0)[f"c{place}"] == 4
    assert relation._tries == rows_module._TRIES


def test_a_very_wide_table_is_read_by_general_code() -> None:
    relation = table(*[INT4] * (MOST_COLUMNS + 1))
    for _ in range(5):
        found = relation.whole(b"N" + row(texts(*["7"] * (MOST_COLUMNS + 1))), 0)
        assert set(found.values()) == {7}
    assert relation.whole == relation._whole
