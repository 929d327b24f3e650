"""Rows are decoded: text, binary and mixed, and values that Python cannot represent."""

from __future__ import annotations

import itertools
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg import pq, sql
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range
from tests.postgres.recording import NULL, TOAST, Recorder, Value, binary, row, texts

from moored.postgres import UNCHANGED, Column, DecodeError, Relation, ReplicaIdentity
from moored.postgres.decode._checks import SIZES
from moored.testing import scaled, stress_threads

INT4, INT8, TEXT, FLOAT8, NUMERIC, JSON, UUID = 23, 20, 25, 701, 1700, 114, 2950
INT4S, TEXTS, INT4RANGE, INT4RANGES = 1007, 1009, 3904, 4451


def table(*types: int, keys: tuple[int, ...] = ()) -> Relation:
    columns = [Column(f"c{n}", oid, -1, n in keys) for n, oid in enumerate(types)]
    return Relation(16400, "public", "t", ReplicaIdentity.DEFAULT, columns)


def read(relation: Relation, *values: Value) -> list[Any]:
    """The values of a row, which must end where it ends."""
    data = b"before" + row(values) + b"after"
    found, end = relation.row(data, 6)
    assert data[end:] == b"after"
    assert list(found) == list(relation.names)
    return list(found.values())


def int4(number: int) -> Value:
    return binary(struct.pack("!i", number))


# -- forms ---------------------------------------------------------------------------------------


def test_a_row_in_text_format() -> None:
    relation = table(INT4, TEXT, FLOAT8, NUMERIC, JSON, 16)
    values = read(relation, *texts("-12", "aé", "1.5", "10.20", '{"a": [1]}', "t"))
    assert values == [-12, "aé", 1.5, Decimal("10.20"), {"a": [1]}, True]


def test_a_row_in_binary_format() -> None:
    relation = table(INT4, TEXT, FLOAT8, 16)
    values = read(relation, int4(-12), binary("aé".encode()), binary(struct.pack("!d", 1.5)),
                  binary(b"\1"))  # fmt: skip
    assert values == [-12, "aé", 1.5, True]


def test_a_row_in_both_formats() -> None:
    relation = table(INT4, INT4, TEXT, JSON)
    assert read(relation, *texts("1"), int4(2), NULL, *texts("null")) == [1, 2, None, None]
    assert read(relation, int4(3), *texts("4", "x"), binary(b"[]")) == [3, 4, "x", []]


def test_null_and_unchanged_values() -> None:
    relation = table(INT4, TEXT, TEXT)
    assert read(relation, NULL, NULL, NULL) == [None, None, None]
    assert read(relation, *texts("1"), TOAST, NULL) == [1, UNCHANGED, None]
    assert read(relation, int4(1), TOAST, binary(b"x")) == [1, UNCHANGED, "x"]
    assert repr(UNCHANGED) == "UNCHANGED"


def test_a_table_without_columns() -> None:
    assert read(table()) == []


def test_unknown_types_are_strings_or_bytes() -> None:
    relation = table(99_999)
    assert read(relation, *texts("so; it is")) == ["so; it is"]
    assert read(relation, binary(b"\xff\0")) == [b"\xff\0"]


def test_shapes_change_from_row_to_row() -> None:
    relation = table(INT4, TEXT, INT8)
    kinds = [NULL, TOAST, *texts("7"), None]
    for number, kind in enumerate(itertools.product(kinds, repeat=3)):
        seven = int4(7), binary(b"7"), binary(struct.pack("!q", 7))
        values = [
            other if chosen is None else chosen for chosen, other in zip(kind, seven, strict=True)
        ]
        known = {b"n": None, b"u": UNCHANGED}
        wanted = [
            known.get(value[0], "7" if place == 1 else 7) for place, value in enumerate(values)
        ]
        assert read(relation, *values) == wanted, number


def test_rows_of_different_shapes_in_threads() -> None:
    """A thread never loads a row with the shape that another thread has just seen."""
    relation = table(INT4, INT4)
    rows = [
        row([*texts("1"), int4(1)]),
        row([int4(2), *texts("2")]),
        row([*texts("3", "3")]),
        row([int4(4), int4(4)]),
    ]

    def look(thread: int, iteration: int) -> None:
        number = (thread + iteration) % len(rows)
        found, _ = relation.row(rows[number], 0)
        assert found == {"c0": number + 1, "c1": number + 1}

    stress_threads(look, threads=4, iterations=scaled(5000, least=500))


def test_keys_returns_the_replica_identity() -> None:
    relation = table(INT4, TEXT, INT4, keys=(0, 2))
    data = row([*texts("1"), NULL, *texts("3")])
    assert relation.keys(data, 0) == ({"c0": 1, "c2": 3}, len(data))


# -- rows that are none --------------------------------------------------------------------------


def test_a_wrong_number_of_columns_is_an_error() -> None:
    with pytest.raises(DecodeError, match=r"public\.t has 1 columns instead of 2"):
        read(table(INT4, INT4), int4(1))
    with pytest.raises(DecodeError, match=r"public\.t has 3 columns instead of 2"):
        read(table(INT4, INT4), int4(1), int4(2), int4(3))


@pytest.mark.parametrize("first", [NULL, *texts("1"), int4(1)], ids=["null", "text", "binary"])
def test_an_unknown_kind_of_value_is_an_error(first: Value) -> None:
    relation = table(INT4, TEXT)
    read(relation, first, *texts("a"))
    data = row([first, *texts("a")]).replace(b"t\0\0\0\1a", b"x\0\0\0\1a")
    with pytest.raises(DecodeError, match="unknown kind 0x78"):
        relation.row(data, 0)


@pytest.mark.parametrize("size", [2, 3, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_size_beyond_the_message_is_an_error(size: int) -> None:
    relation = table(TEXT)
    read(relation, *texts("a"))
    for kind in (b"t", b"b"):
        with pytest.raises(DecodeError, match="ends outside of its message"):
            relation.row(b"\0\1" + kind + struct.pack("!I", size) + b"a", 0)


def test_a_value_that_is_not_utf_8_is_an_error() -> None:
    for value in ((b"t", b"\xff"), (b"b", b"\xff")):
        with pytest.raises(
            DecodeError, match=r"public\.t\.c0 is not valid for its type \(oid 25\)"
        ):
            read(table(TEXT), value)


@pytest.mark.parametrize(
    ("oid", "value"),
    [(INT4, "one"), (FLOAT8, "x"), (JSON, "{"), (JSON, ""), (NUMERIC, "1,5"), (869, "host")],
)
def test_an_invalid_text_value_is_an_error(oid: int, value: str) -> None:
    with pytest.raises(
        DecodeError, match=rf"public\.t\.c1 is not valid for its type \(oid {oid}\)"
    ):
        read(table(INT4, oid), *texts("1", value))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r'{"a\\\\b","x\"y",c}', [r"a\\b", 'x"y', "c"]),
        (r'[0:1]={"=\"",NULL}', ['="', None]),
        (r'{{"\\\\"},{"{,}"}}', [["\\\\"], ["{,}"]]),
    ],
)
def test_arrays_with_quotes(text: str, wanted: object) -> None:
    assert read(table(TEXTS), *texts(text)) == [wanted]


@pytest.mark.parametrize(
    "text",
    [r"{a\,}", r"{a\}", r"\\", r'{"a\"}', r'{a"b\",}', r'{a{"b\}"}', r"[=\{", r'{a;"b\";}'],
)
def test_an_array_with_invalid_quoting_is_an_error(text: str) -> None:
    """The loader in C would write over the end of its memory."""
    with pytest.raises(DecodeError, match=r"c0 is not valid for its type"):
        read(table(TEXTS), *texts(text))


@pytest.mark.parametrize("oid", SIZES)
def test_a_binary_value_of_the_wrong_size_is_an_error(oid: int) -> None:
    """The loaders would read memory that is not the value's."""
    for size in {0, 1, 3, SIZES[oid] - 1, SIZES[oid] + 1, 1000} - {SIZES[oid]}:
        relation = table(TEXT, oid)
        with pytest.raises(DecodeError, match=r"public\.t\.c1 is not valid for its type"):
            read(relation, binary(b"x"), binary(bytes(size)))


def array(element: int, sizes: list[int], items: bytes, dimensions: int | None = None) -> bytes:
    head = struct.pack("!iiI", len(sizes) if dimensions is None else dimensions, 0, element)
    return head + b"".join(struct.pack("!ii", size, 1) for size in sizes) + items


ONE = struct.pack("!ii", 4, 1)
SOUND = {
    "array": (INT4S, array(INT4, [2], ONE * 2), [1, 1]),
    "array of two dimensions": (INT4S, array(INT4, [2, 1], ONE * 2), [[1], [1]]),
    "array with a null": (INT4S, array(INT4, [2], ONE + b"\xff" * 4), [1, None]),
    "empty array": (INT4S, array(INT4, [], b""), []),
    "array of texts": (TEXTS, array(TEXT, [1], b"\0\0\0\1x"), ["x"]),
    "range": (INT4RANGE, b"\x02" + ONE * 2, Range(1, 1, "[)")),
    "empty range": (INT4RANGE, b"\x01", Range(empty=True)),
    "range without end": (INT4RANGE, b"\x12" + ONE, Range(1, None, "[)")),
    "multirange": (
        INT4RANGES,
        b"\0\0\0\1\0\0\0\x11\x02" + ONE * 2,
        Multirange([Range(1, 1, "[)")]),
    ),
    "numeric": (NUMERIC, bytes.fromhex("0001 0000 0000 0000 0007"), Decimal(7)),
}
UNSOUND = {
    "array without a head": (INT4S, b"\0\0\0\1"),
    "empty": (INT4S, b""),
    "array with more items than bytes": (INT4S, array(INT4, [100], ONE)),
    "array with a billion items": (INT4S, array(INT4, [10**9], ONE)),
    "array with fewer items than bytes": (INT4S, array(INT4, [1], ONE * 2)),
    "array of other things": (INT4S, array(TEXT, [1], b"\0\0\0\1x")),
    "array of seven dimensions": (INT4S, array(INT4, [1] * 7, ONE)),
    "array of minus one dimensions": (INT4S, array(INT4, [], b"", dimensions=-1)),
    "array of a negative size": (INT4S, array(INT4, [-1], b"")),
    "array that ends within its head": (INT4S, array(INT4, [], b"", dimensions=3)),
    "array with an item of a wrong size": (INT4S, array(INT4, [1], b"\0\0\0\3abc")),
    "array with an item that is too long": (TEXTS, array(TEXT, [1], b"\0\0\x10\0x")),
    "array with an item of size -5": (TEXTS, array(TEXT, [1], b"\xff\xff\xff\xfbx")),
    "empty range with more": (INT4RANGE, b"\x01" + ONE),
    "range of nothing": (INT4RANGE, b""),
    "range without its bounds": (INT4RANGE, b"\x02"),
    "range with one bound": (INT4RANGE, b"\x02" + ONE),
    "range with three bounds": (INT4RANGE, b"\x02" + ONE * 3),
    "range with a short bound": (INT4RANGE, b"\x0a\0\0\0\1\0"),
    "range with a null": (INT4RANGE, b"\x0a" + b"\xff" * 4),
    "multirange of nothing": (INT4RANGES, b""),
    "multirange of too many": (INT4RANGES, b"\x7f\0\0\0"),
    "multirange that ends early": (INT4RANGES, b"\0\0\0\1\0\0\0\x11\x02" + ONE),
    "multirange with more": (INT4RANGES, b"\0\0\0\0x"),
    "numeric of nothing": (NUMERIC, b""),
    "numeric without its digits": (NUMERIC, bytes.fromhex("0002 0000 0000 0000 0007")),
    "numeric of an unknown sign": (NUMERIC, bytes.fromhex("0001 0000 1111 0000 0007")),
    "inet of an unknown family": (869, b"\x09\x20\0\4\1\2\3\4"),
}


@pytest.mark.parametrize(("oid", "data", "wanted"), SOUND.values(), ids=SOUND)
def test_binary_arrays_and_ranges(oid: int, data: bytes, wanted: object) -> None:
    assert read(table(oid), binary(data)) == [wanted]


@pytest.mark.parametrize(("oid", "data"), UNSOUND.values(), ids=UNSOUND)
def test_an_invalid_binary_value_is_an_error(oid: int, data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"public\.t\.c0 is not valid for its type"):
        read(table(oid), binary(data))


def test_values_of_record_types_are_not_parsed() -> None:
    """The loaders of records do not check their input."""
    assert read(table(2249), binary(b"\0\0\0\1\0\0\0\x17\0\0\0\0")) == [
        b"\0\0\0\1\0\0\0\x17\0\0\0\0"
    ]
    assert read(table(2249), *texts("(")) == ["("]


# -- types that psycopg has no binary loader for ------------------------------------------------


def test_fixed_sizes_are_those_of_the_server(postgres_url: str) -> None:
    """Of the types that are loaded: a loader would read beyond a value of another size."""
    with psycopg.connect(postgres_url) as connection:
        fixed = connection.execute(
            "select oid::int, typlen from pg_type "
            "where typtype = 'b' and typlen > 0 and typsend <> 0 and oid < 10000 "
            "and typname not in ('name', 'char')"
        ).fetchall()
    loaded = psycopg.adapters.get_loader
    assert {oid: size for oid, size in fixed if loaded(oid, pq.Format.BINARY)} == SIZES


def test_types_without_a_binary_loader_are_bytes() -> None:
    oids = {600: bytes(16), 2205: struct.pack("!I", 16400), 142: b"<a/>", 3614: b"\0\0\0\0"}
    found = read(table(*oids), *map(binary, oids.values()))
    assert found == list(oids.values())
    assert read(table(18, 1002), binary(b"\xff"), binary(array(18, [1], b"\0\0\0\1\xff"))) == [
        b"\xff",
        [b"\xff"],
    ]


# -- values that Python cannot hold --------------------------------------------------------------

UNHELD = [
    ("date", "infinity"),
    ("date", "-infinity"),
    ("date", "12000-02-29"),
    ("date", "0044-03-15 BC"),
    ("date", "0001-12-31 BC"),
    ("date", "4713-11-24 BC"),
    ("date", "5874897-12-31"),
    ("time", "24:00:00"),
    ("timetz", "24:00:00-11:30"),
    ("timetz", "24:00:00+15:59:59"),
    ("timetz", "24:00:00+02"),
    ("timestamp", "infinity"),
    ("timestamp", "-infinity"),
    ("timestamp", "294276-12-31 23:59:59.999999"),
    ("timestamp", "4713-11-24 00:00:00 BC"),
    ("timestamp", "0001-12-31 23:59:59.5 BC"),
    ("timestamptz", "infinity"),
    ("timestamptz", "-infinity"),
    ("timestamptz", "10000-01-01 00:00:00+00"),
    ("timestamptz", "0044-03-15 12:00:00.25+00 BC"),
    ("interval", "infinity"),
    ("interval", "-infinity"),
    ("interval", "178000000 years"),
    ("interval", "-178000000 years 1 mon -1 days +00:00:00.000001"),
    ("interval", "2147483647 days -2147483647:00:00"),
    ("json", "[" * 3000 + "]" * 3000),
    ("jsonb", "[" * 3000 + "]" * 3000),
    ("json", "1" * 5000),
    ("jsonb", "1" * 5000),
]


def declared(types: list[str]) -> sql.Composed:
    parts = [sql.SQL("c{} " + name).format(sql.SQL(str(n))) for n, name in enumerate(types)]
    return sql.SQL("create table t ({})").format(sql.SQL(", ").join(parts))


def test_an_unrepresentable_value_is_the_string_that_the_server_writes(postgres_url: str) -> None:
    types = [name for name, _ in UNHELD]
    with Recorder.on(postgres_url) as recorder:
        recorder.connection.execute(declared(types))
        slot = recorder.slot()
        marks = sql.SQL(", ").join(sql.Placeholder() * len(types))
        values = [value for _, value in UNHELD]
        recorder.connection.execute(sql.SQL("insert into t values ({})").format(marks), values)
        (text,) = recorder.inserted(slot)
        (found,) = recorder.inserted(slot, binary="true")
        for (name, value), column in zip(UNHELD, text, strict=True):
            query = sql.SQL("select {}::text from t").format(sql.Identifier(column))
            (want,) = recorder.connection.execute(query).fetchone() or (None,)
            assert text[column] == want, (name, value)
            if "infinity" in value and name != "interval":
                assert found[column] == want, (name, value)
            else:
                assert isinstance(found[column], bytes), (name, value)


def test_within_an_array_or_a_range_only_that_element_is_a_string(postgres_url: str) -> None:
    with Recorder.on(postgres_url) as recorder:
        recorder.run("create table t (a date[], b tstzrange, c datemultirange, d int)")
        slot = recorder.slot()
        recorder.run(
            "insert into t values ('{2020-01-01,infinity,NULL}', '[2020-01-01 00:00+00,infinity)',"
            " '{(-infinity,2020-01-01]}', 7)"
        )
        for form in ("false", "true"):
            (found,) = recorder.inserted(slot, binary=form)
            assert found == {
                "a": [date(2020, 1, 1), "infinity", None],
                "b": Range(datetime(2020, 1, 1, tzinfo=UTC), "infinity", "[)"),
                "c": Multirange([Range("-infinity", date(2020, 1, 2), "()")]),
                "d": 7,
            }


def test_other_values_beside_an_unrepresentable_one_are_unaffected() -> None:
    relation = table(1082, INT4, JSON)
    assert read(relation, *texts("infinity", "1", "[1]")) == ["infinity", 1, [1]]
    assert read(relation, *texts("2020-02-03", "1", "[1]")) == [date(2020, 2, 3), 1, [1]]
    with pytest.raises(DecodeError, match=r"c1 is not valid for its type"):
        read(relation, *texts("infinity", "one", "[1]"))


def test_a_text_value_that_cannot_be_loaded_stays_a_string() -> None:
    assert read(table(INT4RANGES), *texts("{[1,")) == ["{[1,"]
