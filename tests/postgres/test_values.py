"""Values of types that are not built in: a change has the same Python values as a query."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import pq, sql
from psycopg.types import TypeInfo
from psycopg.types.composite import CompositeInfo, register_composite
from psycopg.types.multirange import MultirangeInfo, register_multirange
from psycopg.types.range import Range, RangeInfo, register_range
from tests.postgres.literals import Literals, array, finite, small_range, span, timestamptz, words
from tests.postgres.recording import Recorder
from tests.postgres.test_roundtrip import same

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres.decode import Assembler, OwnType, Types
from moored.postgres.decode._changes import Insert
from moored.postgres.server import _admin
from moored.testing import scaled

from ..servers import empty_database
from .conftest import MakePostgres, Sql
from .recording import feed_all
from .server import LIMIT, connected, following

Rows = list[dict[str, Any]]

DEFINITIONS = (
    "create type mood as enum ('happy', 'sad', 'so; \"so\"')",
    "create domain small as int check (value < 100)",
    "create domain smaller as small check (value < 50)",
    "create domain feeling as mood",
    "create domain words as text[]",
    "create type pair as (one int, other text)",
    "create type nested as (m mood, p pair, s smaller, w words, t timestamptz, r int4range)",
    "create type floats as range (subtype = float8, multirange_type_name = many_floats)",
    "create type moods as range (subtype = mood)",
)


def record(*fields: Literals) -> Literals:
    """A composite value; each field may be null."""
    parts = [st.one_of(st.just(""), field.map(_field)) for field in fields]
    return st.tuples(*parts).map(lambda each: f"({','.join(each)})")


def _field(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '""')
    return f'"{escaped}"'


mood = st.sampled_from(["happy", "sad", 'so; "so"'])
smaller = st.integers(-(2**31), 49).map(str)
pair = record(st.integers(-(2**31), 2**31 - 1).map(str), words)
nested = record(mood, pair, smaller, array(words), timestamptz, small_range)
floats = span(finite.map(repr), float)
TYPES: dict[str, Literals] = {
    "mood": mood,
    "small": st.integers(-(2**31), 99).map(str),
    "smaller": smaller,
    "feeling": mood,
    "words": array(words),
    "pair": pair,
    "nested": nested,
    "floats": floats,
    "many_floats": st.just('{[1.5,2),(3,"1e300"]}'),
    "moods": span(mood, ["happy", "sad", 'so; "so"'].index).filter(lambda text: ";" not in text),
    "mood[]": array(mood),
    "smaller[]": array(smaller),
    "pair[]": array(pair),
    "nested[]": array(nested, size=2),
    "floats[]": array(floats),
    "feeling[]": array(mood),
}


@pytest.fixture(scope="module")
def recorder(postgres: SyncEmbeddedPostgres) -> Iterator[Recorder]:
    """A database with the types, and a connection that has registered them with psycopg."""
    with empty_database(postgres) as url, Recorder.on(url) as recorder:
        recorder.run(*DEFINITIONS)
        columns = ", ".join(f'"{name}" {name}' for name in TYPES)
        recorder.connection.execute(f"create table t (n serial, {columns})".encode())
        register(recorder.connection)
        yield recorder


def register(conn: psycopg.Connection[Any]) -> None:
    def found(kind: Any, name: str) -> Any:
        info = kind.fetch(conn, name)
        assert info is not None, name
        return info

    # psycopg has nothing for a domain within a composite type or an array: it is as its base type.
    for name, base in (("mood", 25), ("smaller", 23), ("feeling", 25), ("words", 1009)):
        info = found(TypeInfo, name)
        info.register(conn)
        for form in pq.Format:
            loader = conn.adapters.get_loader(base, form)
            assert loader is not None
            conn.adapters.register_loader(info.oid, loader)
    register_range(found(RangeInfo, "floats"), conn)
    register_range(found(RangeInfo, "moods"), conn)
    register_multirange(found(MultirangeInfo, "many_floats"), conn)
    register_composite(found(CompositeInfo, "pair"), conn)
    register_composite(found(CompositeInfo, "nested"), conn)


async def described(url: str, oids: set[int]) -> list[OwnType]:
    async with connected(url) as conn:
        return await _admin.own_types(conn, oids)


def streamed(recorder: Recorder, slot: str, types: Types, **options: str) -> Rows:
    """Return the new rows in a slot, with the types that the server describes."""
    assembler = Assembler(types=types)
    transactions = feed_all(recorder.peek(slot, **options), assembler)
    if unknown := assembler.unknown_types:
        types.add(unknown, asyncio.run(described(recorder.url, unknown)))
    changes = [change for each in transactions for change in each if isinstance(change, Insert)]
    return [change.new for change in changes if change.new is not None]


def inserted(recorder: Recorder, rows: list[tuple[str | None, ...]]) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, TYPES))
    marks = sql.SQL(", ").join(sql.Placeholder() * len(TYPES))
    insert = sql.SQL("insert into t ({}) values ({})").format(names, marks)
    with recorder.connection.transaction(), recorder.connection.cursor() as cursor:
        cursor.executemany(insert, rows)


def queried(recorder: Recorder) -> Rows:
    cursor = recorder.connection.execute("select * from t order by n")
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


known = Types()


@settings(
    max_examples=scaled(300, least=6),
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(*(st.one_of(each, each, st.none()) for each in TYPES.values())),
        min_size=1,
        max_size=8,
    )
)
def test_values_of_own_types_equal_those_of_a_query(
    recorder: Recorder, rows: list[tuple[str | None, ...]]
) -> None:
    slot = recorder.slot()
    try:
        recorder.run("truncate t")
        inserted(recorder, rows)
        wanted = queried(recorder)
        for options in ({}, {"binary": "true"}):
            got = streamed(recorder, slot, known, **options)
            assert len(got) == len(wanted)
            for one, other in zip(got, wanted, strict=True):
                for name in TYPES:
                    assert same(one[name], other[name]), (name, options, one[name], other[name])
    finally:
        recorder.drop(slot)


def test_a_value_that_does_not_fit_the_description_of_its_type_stays_as_it_is(
    recorder: Recorder,
) -> None:
    """A composite type that was altered after it was described, in both directions."""
    slot = recorder.slot()
    recorder.run(
        "create type grows as (a int)",
        "create table growing (g grows, again grows[])",
        "insert into growing values (row(1), array[row(2)::grows])",
    )
    before = Types()
    streamed(recorder, slot, before)
    recorder.run(
        "alter type grows add attribute b text",
        "insert into growing values (row(1, 'x'), array[row(2, 'y')::grows])",
    )
    (_, second) = streamed(recorder, slot, before)
    assert second == {"g": "(1,x)", "again": '{"(2,y)"}'}
    (_, second) = streamed(recorder, slot, before, binary="true")
    assert [type(value) for value in second.values()] == [bytes, bytes]
    after = Types()
    for options in ({}, {"binary": "true"}):
        (_, second) = streamed(recorder, slot, after, **options)
        assert second == {"g": (1, "x"), "again": [(2, "y")]}
        assert second["g"].b == "x"


def test_a_part_of_a_value_that_python_cannot_represent_stays_as_it_is(recorder: Recorder) -> None:
    slot = recorder.slot()
    recorder.run(
        "create domain moment as timestamptz",
        "create type span as (begins moment, ends timestamptz, label text)",
        "create table moments (one moment, many moment[], s span)",
        "insert into moments values ('infinity', '{-infinity}', ('infinity', '-infinity', 'x'))",
    )
    for options in ({}, {"binary": "true"}):
        for _ in range(2):  # with general code, and with code that is generated for the table
            rows = streamed(recorder, slot, Types(), **options)
            expected = {
                "one": "infinity",
                "many": ["-infinity"],
                "s": ("infinity", "-infinity", "x"),
            }
            assert rows == [expected] * len(rows)
            recorder.run(*["insert into moments select * from moments limit 1"] * 5)


def test_a_dropped_type_is_read_as_text(recorder: Recorder) -> None:
    slot = recorder.slot()
    recorder.run(
        "create type brief as enum ('a')",
        "create table fleeting (b brief)",
        "insert into fleeting values ('a')",
        "drop table fleeting",
        "drop type brief",
    )
    types = Types()
    assert streamed(recorder, slot, types) == [{"b": "a"}]
    assert streamed(recorder, slot, types, binary="true") == [{"b": b"a"}]


def test_types_are_described_again_for_each_connection_and_replaced_if_they_differ() -> None:
    types, oid = Types(), 20000
    types.add({oid}, [OwnType(oid, "pair", "c", names=("a",), fields=(23,))])
    load = types.loader(oid, pq.Format.TEXT, lenient=False)
    assert load(b"(1)") == (1,)
    assert types.unknown({oid, 23}) == set()
    types.expire()
    assert types.unknown({oid, 23}) == {oid}
    assert types.loader(oid, pq.Format.TEXT, lenient=False) is load
    types.add({oid}, [OwnType(oid, "pair", "e")])
    assert types.loader(oid, pq.Format.TEXT, lenient=False)(b"(1)") == "(1)"


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_a_stream_has_own_types_also_those_created_meanwhile(
    make: MakePostgres, sql: Sql, binary: bool
) -> None:
    for statement in (*DEFINITIONS, "create table t (id int primary key, p pair, m mood[])"):
        await sql.execute(statement.encode())
    async with make(binary=binary) as pg:
        changes = pg.changes(tables=["t"])
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("insert into t values (1, (7, 'x'), '{sad,NULL}')")
        (first,) = await following(changes)
        assert first.new == {"id": 1, "p": (7, "x"), "m": ["sad", None]}
        assert first.new["p"].other == "x"
        await sql.execute("create type later as range (subtype = pair)")
        await sql.execute("alter table t add r later")
        await sql.execute("insert into t values (2, null, '{}', '[\"(1,a)\",\"(2,b)\")')")
        (second,) = await following(changes)
        assert second.new == {"id": 2, "p": None, "m": [], "r": Range((1, "a"), (2, "b"))}
