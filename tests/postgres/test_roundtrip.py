"""A value of the stream equals that of a query, for every type."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import pq, sql
from tests.postgres.literals import OWN_TYPES, TYPES
from tests.postgres.recording import Recorder

from moored.testing import scaled

Rows = list[dict[str, Any]]

#: So many types are tried in one table: each example costs a few statements, whatever it holds.
WIDTH = 12
NAMES = list(TYPES)
GROUPS = [NAMES[first : first + WIDTH] for first in range(0, len(NAMES), WIDTH)]

quickly = settings(
    max_examples=scaled(60, least=3),
    deadline=None,
    phases=[Phase.generate],  # a smaller example is not worth the minutes that it takes to find
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def recorder(postgres_url: str) -> Iterator[Recorder]:
    with Recorder.on(postgres_url) as recorder:
        recorder.run(
            "create type mood as enum ('happy', 'sad', 'so; \"so\"')",
            "create domain small as int check (value < 100)",
            "create type pair as (one int, other text)",
        )
        yield recorder


def a_row(types: list[str]) -> st.SearchStrategy[tuple[str | None, ...]]:
    known = TYPES | OWN_TYPES
    return st.tuples(*(st.one_of(known[name], known[name], st.none()) for name in types))


def streamed(
    recorder: Recorder, slot: str, types: list[str], values: list[tuple[str | None, ...]]
) -> tuple[Rows, Rows, Rows, Rows]:
    """What came as text, as binary, from a query, and from a query for their texts."""
    columns = [f"c{number}" for number in range(len(types))]
    declared = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(name))
        for column, name in zip(columns, types, strict=True)
    )
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    marks = sql.SQL(", ").join(sql.Placeholder() * len(columns))
    connection = recorder.connection
    connection.execute(sql.SQL("create table t (n serial, {})").format(declared))
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(sql.SQL("insert into t ({}) values ({})").format(names, marks), values)
    text = recorder.inserted(slot)
    binary = recorder.inserted(slot, binary="true")
    return text, binary, queried(recorder, columns), queried(recorder, columns, "::text")


def queried(recorder: Recorder, columns: list[str], cast: str = "") -> Rows:
    wanted = sql.SQL(", ").join(
        sql.SQL("{}{}").format(sql.Identifier(column), sql.SQL(cast)) for column in columns
    )
    found = recorder.connection.execute(sql.SQL("select n, {} from t order by n").format(wanted))
    return [dict(zip(["n", *columns], row, strict=True)) for row in found]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same type; NaN equals NaN."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if repr(one) == repr(other) == "Decimal('NaN')":
        return True
    return type(one) is type(other) and bool(one == other)


def has_binary_loader(name: str) -> bool:
    """Whether psycopg loads values of this type, or of its elements, in binary format."""
    base = re.sub(r"\(.*\)|\[\]", "", name)
    known = psycopg.adapters.types.get(base)
    if known is None or name == '"char"':
        return False
    return psycopg.adapters.get_loader(known.oid, pq.Format.BINARY) is not None


def is_bytes(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_bytes, value))
    return value is None or isinstance(value, bytes)


def check(given: Rows, wanted: Rows, types: list[str], *, binary: bool = False) -> None:
    assert len(given) == len(wanted)
    for got, want in zip(given, wanted, strict=True):
        for number, name in enumerate(types):
            column = f"c{number}"
            if binary and not has_binary_loader(name):
                assert is_bytes(got[column]), (name, got[column])
                assert (got[column] is None) is (want[column] is None)
            elif name == "float4":
                # As text it has as few digits as tell it from other float4, as binary all of them.
                assert same(short(got[column]), short(want[column]))
            else:
                assert same(got[column], want[column]), (name, got[column], want[column])


def short(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("f", value)


def round_trip(recorder: Recorder, types: list[str], values: list[tuple[str | None, ...]]) -> None:
    slot = recorder.slot()
    try:
        text, binary, wanted, _ = streamed(recorder, slot, types, values)
        check(text, wanted, types)
        check(binary, wanted, types, binary=True)
    finally:
        recorder.run("drop table if exists t")
        recorder.drop(slot)


@pytest.mark.parametrize("types", GROUPS, ids=lambda types: types[0])
@quickly
@given(data=st.data())
def test_every_built_in_type_equals_a_query(
    recorder: Recorder, types: list[str], data: st.DataObject
) -> None:
    round_trip(recorder, types, data.draw(st.lists(a_row(types), min_size=1, max_size=8)))


@quickly
@given(data=st.data())
def test_random_tables_equal_a_query(recorder: Recorder, data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=WIDTH))
    round_trip(recorder, types, data.draw(st.lists(a_row(types), min_size=1, max_size=8)))


def test_there_are_more_than_forty_types() -> None:
    assert len(TYPES) > 40


@quickly
@given(data=st.data())
def test_types_that_are_not_built_in_come_as_text(recorder: Recorder, data: st.DataObject) -> None:
    """In binary format they cannot be decoded without the catalog: they are bytes."""
    types = list(OWN_TYPES)
    values = data.draw(st.lists(a_row(types), min_size=1, max_size=8))
    slot = recorder.slot()
    try:
        text, binary, _, wanted = streamed(recorder, slot, types, values)
        check(text, wanted, types)
        for got, want in zip(binary, wanted, strict=True):
            assert [type(got[column]) for column in want if column != "n"] == [
                type(None) if want[column] is None else bytes for column in want if column != "n"
            ]
    finally:
        recorder.run("drop table if exists t")
        recorder.drop(slot)
