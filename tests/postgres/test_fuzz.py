"""The decoder returns correct data or raises `DecodeError` for any input."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.postgres.recording import (
    NULL,
    TOAST,
    Recorder,
    Value,
    begin,
    commit,
    delete,
    framed,
    insert,
    relation,
    row,
    text,
    update,
)

from moored.postgres import Change, DecodeError, Relation
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._pgoutput import parse
from moored.postgres.decode._wire import read_keepalive
from moored.testing import base_seed, scaled

often = settings(
    max_examples=scaled(3_000, least=30),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
KINDS = b"BCORYTMIUD"


def consume(messages: list[bytes]) -> list[tuple[object, ...]] | None:
    """Return the decoded content of these messages, or None if they are invalid."""
    assembler = Assembler()
    found: list[tuple[object, ...]] = []
    try:
        for message in messages:
            committed = assembler.feed(message)
            if committed is None:
                continue
            found.append((committed.xid, committed.commit_lsn, committed.commit_time))
            for change in committed:
                rows = (change.old, change.new) if isinstance(change, Change) else (repr(change),)
                found.append((change.kind, *map(repr, rows)))
    except DecodeError:
        return None
    return found


# -- random bytes --------------------------------------------------------------------------------

kinds = st.sampled_from([bytes([kind]) for kind in KINDS])


@often
@given(st.one_of(st.binary(), st.builds(bytes.__add__, kinds, st.binary())))
def test_random_bytes_as_a_message(data: bytes) -> None:
    if data[:1] in (b"I", b"U", b"D"):
        return
    with suppress(DecodeError):
        parse(data, 0)


@often
@given(st.lists(st.builds(bytes.__add__, kinds, st.binary(max_size=40)), max_size=8))
def test_random_bytes_as_a_stream(messages: list[bytes]) -> None:
    consume([framed(message) for message in messages])


@often
@given(st.binary(max_size=60))
def test_random_bytes_from_the_server(data: bytes) -> None:
    """As a keepalive, and as a message of the stream."""
    for read in (read_keepalive, Assembler().feed):
        with suppress(DecodeError):
            read(data)


# -- random values -------------------------------------------------------------------------------

OIDS = sorted({oid for each in psycopg.adapters.types for oid in (each.oid, each.array_oid) if oid})
AWKWARD = [
    b"", b"\0", b"\1", b"{}", b"{1", b'{"', b"[1,2)", b"empty", b"infinity", b"NaN", b"\\x0",
        b"2020-01-01", b"2020-01-01 00:00:00+00", b"24:00:00", b"99:99:99", b"1 mon", b"\xff" * 8,
        b"\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 7, b"\0" * 8, b"\0\0\0\1" * 3, b"\0\0\0\1" * 9,
        struct.pack("!iiIii", 1, 0, 23, 1, 1), struct.pack("!iiIii", 6, 0, 25, 2**31 - 1, 1),
        b"\x02\0\0\0\4\0\0\0\1", b"\0\0\0\1\0\0\0\1\1", b"\0\1\0\0\0\0\0\0\0\7",
]  # fmt: skip
contents = st.one_of(st.binary(max_size=40), st.sampled_from(AWKWARD))
values = st.one_of(
    st.just(NULL),
    st.just(TOAST),
    st.tuples(st.sampled_from([b"t", b"b"]), contents),
)


@pytest.mark.parametrize("kind", [b"t", b"b"], ids=["text", "binary"])
def test_random_values_of_every_type(kind: bytes) -> None:
    """psycopg's loaders in C must not be given what would make them read elsewhere."""
    chance = random.Random(base_seed())
    for oid in OIDS:
        table = parse(relation([("c", oid)]), 0)
        assert isinstance(table, Relation)
        chosen = [chance.randbytes(chance.randrange(40)) for _ in range(scaled(300, least=3))]
        for content in AWKWARD + chosen:
            with suppress(DecodeError):
                table.row(row([(kind, content)]), 0)


PIECES = [
    "{",
    "}",
    '"',
    ",",
    ";",
    "\\",
    "a",
    "1",
    "NULL",
    "=",
    "[",
    "]",
    "(",
    ")",
    ":",
    "-",
    " ",
    "é",
]


def test_random_arrays_as_text() -> None:
    """Of the characters that mean something in them, in any order."""
    chance = random.Random(base_seed())
    tables = [parse(relation([("c", oid)]), 0) for oid in (1007, 1009, 1020, 1231)]
    for _ in range(scaled(100_000, least=2000)):
        table, written = chance.choice(tables), chance.choices(PIECES, k=chance.randrange(14))
        assert isinstance(table, Relation)
        content = "".join(chance.choice([written, ["{", *written, "}"]])).encode()
        with suppress(DecodeError):
            table.row(row([(b"t", content)]), 0)


columns = st.lists(st.sampled_from([16, 18, 20, 21, 23, 25, 701, 1007, 1009, 1082, 1184, 1700, 3802,
                                    3904, 4451, 600, 3614, 3615, 99_999]), max_size=4)  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Messages as they should be, mostly, and then some bytes are others."""
    oids = draw(columns)
    described = [(f"c{n}", oid, draw(st.booleans())) for n, oid in enumerate(oids)]
    rows: st.SearchStrategy[list[Value]] = st.lists(values, min_size=len(oids), max_size=len(oids))
    change = st.one_of(
        rows.map(insert),
        rows.map(update),
        st.tuples(rows, rows, st.sampled_from([b"K", b"O"])).map(
            lambda t: update(t[0], old=(t[2], t[1]))
        ),
        st.tuples(rows, st.sampled_from([b"K", b"O"])).map(lambda t: delete(t[0], kind=t[1])),
        st.just(b"T" + struct.pack("!IBI", 1, 0, 16400)),
        contents.map(lambda c: b"M\1" + bytes(8) + text("p") + struct.pack("!I", len(c)) + c),
    )
    messages = [begin(), relation(described), *draw(st.lists(change, max_size=4)), commit()]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(messages) - 1))
        messages[place] = draw(mutations(messages[place]))
    return messages


@st.composite
def mutations(draw: st.DrawFn, message: bytes) -> bytes:
    """A message of which a byte is another, or is missing, or comes twice."""
    place = draw(st.integers(0, max(0, len(message) - 1)))
    other = draw(st.sampled_from([b"", b"\0", b"\1", b"\x7f", b"\x80", b"\xff", b"n", b"t", b"b"]))
    kept = draw(st.booleans())
    return message[:place] + other + message[place + (not kept) :]


@often
@given(streams())
def test_messages_with_changed_bytes(messages: list[bytes]) -> None:
    consume([framed(message) for message in messages])


# -- recorded streams ----------------------------------------------------------------------------

TABLES = (
    "create type mood as enum ('happy', 'sad')",
    "create table a (id int primary key, name text, size numeric, at timestamptz, ok bool)",
    "create table b (id uuid primary key, tags text[], spans int4range, doc jsonb, m mood,"
    " p point)",
    "create table c (id int primary key, f float8, i interval, d date[], t tsvector, v varbit,"
    " n inet, r datemultirange, x bytea)",
    "alter table a replica identity full",
)
ROWS = (
    "insert into a values (1, 'é', 1.50, '2020-01-02 03:04:05+00', true)",
    "insert into a values (2, null, 'NaN', now(), false)",
    "update a set name = repeat('x', 30), id = 3 where id = 1",
    "insert into b values ('00000000-0000-0000-0000-000000000001', '{a,\"b c\",NULL}', '[1,5)',"
    " '{\"k\": [1, null]}', 'happy', '(1.5,-2)')",
    "insert into c values (1, 'Infinity', '1 mon -2 days', '{2020-01-01,infinity}', 'a:1A b',"
    " '10110', '10.0.0.1/8', '{[2020-01-01,2020-02-01)}', '\\x00ff')",
    "delete from a where id = 2",
    "select pg_logical_emit_message(true, 'prefix', 'content')",
    "truncate b, c",
)
FORMS = {
    "text": {"messages": "true"},
    "binary": {"messages": "true", "binary": "true"},
}


@pytest.fixture(params=list(FORMS.values()), ids=list(FORMS))
def recorded(postgres_url: str, request: pytest.FixtureRequest) -> Iterator[list[bytes]]:
    """A small stream with a bit of everything, as a real server sends it."""
    with Recorder.on(postgres_url) as recorder:
        for statement in TABLES:
            recorder.connection.execute(statement.encode())
        slot = recorder.slot()
        for statements in (ROWS[:4], ROWS[4:]):
            with recorder.connection.transaction():
                for number, statement in enumerate(statements):
                    recorder.connection.execute(f"savepoint s{number}".encode())
                    recorder.connection.execute(statement.encode())
                recorder.run("savepoint last", "insert into a values (77)", "rollback to last")
        yield [framed(message) for message in recorder.peek(slot, **request.param)]


def described(recorded: list[bytes]) -> list[tuple[object, ...]]:
    found = consume(recorded)
    assert found is not None
    assert len(found) > 10
    return found


def test_byte_flips_of_a_recorded_stream(recorded: list[bytes]) -> None:
    described(recorded)
    chance = random.Random(base_seed())
    refused = 0
    rounds = scaled(10_000, least=150)
    for _ in range(rounds):
        messages = list(recorded)
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            place = chance.randrange(len(messages))
            message = bytearray(messages[place])
            at = chance.randrange(25, len(message))
            message[at] = chance.choice(
                [message[at] ^ 1 << chance.randrange(8), chance.randrange(256)]
            )
            messages[place] = bytes(message)
        refused += consume(messages) is None
    assert 0 < refused < rounds, "some flips make another value, and some are noticed"


def test_truncated_and_extended_messages(recorded: list[bytes]) -> None:
    """Not only does nothing break: that something is missing is always noticed."""
    described(recorded)
    for place, message in enumerate(recorded):
        cuts = range(26, len(message), 1 + len(message) // scaled(300, least=12))
        shorter = [message[:cut] for cut in cuts]
        for broken in (*shorter, message + b"\0", message + message[25:]):
            assert consume([*recorded[:place], broken, *recorded[place + 1 :]]) is None


FRAME = {b"B", b"C"}


def test_missing_and_duplicate_begins_and_commits(recorded: list[bytes]) -> None:
    for place, message in enumerate(recorded):
        if message[25:26] not in FRAME or place == len(recorded) - 1:
            continue
        assert consume([*recorded[:place], *recorded[place + 1 :]]) is None
        assert consume([*recorded[:place], message, *recorded[place:]]) is None


def test_missing_table_descriptions(recorded: list[bytes]) -> None:
    without = [message for message in recorded if message[25:26] != b"R"]
    assert consume(without) is None


def frames(message: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Where in a row are its count and the sizes of its values: begin and end of each."""
    (count,) = struct.unpack_from("!H", message, at)
    yield at, at + 2
    at += 2
    for _ in range(count):
        if message[at : at + 1] in (b"t", b"b"):
            yield at + 1, at + 5
            at += 5 + struct.unpack_from("!I", message, at + 1)[0]
        else:
            at += 1


def test_changed_counts_and_sizes(recorded: list[bytes]) -> None:
    """A row with extra bytes after it is never accepted."""
    chance = random.Random(base_seed())
    tried = 0
    for place, message in enumerate(recorded):
        if message[25:26] != b"I":
            continue
        for begins, ends in frames(message, 31):
            for _ in range(scaled(50, least=5)):
                at, byte = chance.randrange(begins, ends), chance.randrange(1, 256)
                other = message[:at] + bytes([message[at] ^ byte]) + message[at + 1 :]
                found = consume([*recorded[:place], other, *recorded[place + 1 :]])
                assert found is None, (message, at, byte)
                tried += 1
    assert tried > 50


def same_after(change: Callable[[bytes], bytes], recorded: list[bytes]) -> bool:
    return consume([change(message) for message in recorded]) == consume(recorded)


def test_changed_headers_do_not_affect_the_content(recorded: list[bytes]) -> None:
    assert same_after(lambda message: framed(message[25:], 2**64 - 1, 7, -5), recorded)
