"""Changes have the right old and new rows, with hand-made messages and a real server."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from tests.postgres.recording import (
    NULL,
    TOAST,
    Recorder,
    Value,
    begin,
    commit,
    delete,
    feed_all,
    insert,
    relation,
    row,
    texts,
    update,
)

from moored.postgres import (
    UNCHANGED,
    Change,
    DecodeError,
    Delete,
    Emitted,
    Insert,
    ReplicaIdentity,
    Truncate,
    Update,
)

T = relation([("id", 23, True), ("name", 25), ("body", 25)])


def one(message: bytes, table: bytes = T) -> Change | Truncate | Emitted:
    """The only change of a transaction."""
    (committed,) = feed_all([begin(), table, message, commit()])
    (change,) = committed
    return change


def row_change(message: bytes, table: bytes = T) -> Change:
    change = one(message, table)
    assert isinstance(change, Change)
    return change


@pytest.fixture
def recorder(postgres_url: str) -> Iterator[Recorder]:
    with Recorder.on(postgres_url) as recorder:
        yield recorder


# -- by hand -------------------------------------------------------------------------------------


def test_an_insert_has_a_new_row_only() -> None:
    change = row_change(insert(texts("1", "a", None)))
    assert isinstance(change, Insert)
    assert (change.kind, change.schema, change.table) == ("insert", "public", "t")
    assert change.old is None
    assert change.new == {"id": 1, "name": "a", "body": None}
    assert repr(change) == "<Insert public.t>"


def test_an_update_without_a_change_of_the_key_has_no_old_row() -> None:
    change = row_change(update(texts("1", "b", None)))
    assert isinstance(change, Update)
    assert (change.kind, change.old) == ("update", None)
    assert change.new == {"id": 1, "name": "b", "body": None}


def test_an_update_of_the_key_has_the_old_key_only() -> None:
    change = row_change(update(texts("2", "b", None), old=(b"K", texts("1", None, None))))
    assert change.old == {"id": 1}
    assert change.new == {"id": 2, "name": "b", "body": None}


def test_an_update_with_full_identity_has_the_whole_old_row() -> None:
    change = row_change(update(texts("1", "b", None), old=(b"O", texts("1", "a", "long"))))
    assert change.old == {"id": 1, "name": "a", "body": "long"}
    assert change.new == {"id": 1, "name": "b", "body": None}


def test_a_large_value_that_was_not_sent_is_taken_from_the_old_row_if_there_is_one() -> None:
    values: list[Value] = [*texts("1", "b"), TOAST]
    assert row_change(update(values)).new == {"id": 1, "name": "b", "body": UNCHANGED}
    change = row_change(update(values, old=(b"O", texts("1", "a", "long"))))
    assert change.new == {"id": 1, "name": "b", "body": "long"}
    # The other columns of a key are sent as null, which means nothing.
    change = row_change(update(values, old=(b"K", texts("0", None, None))))
    assert change.new == {"id": 1, "name": "b", "body": UNCHANGED}


@pytest.mark.parametrize(
    ("kind", "old"),
    [(b"K", {"id": 1}), (b"O", {"id": 1, "name": None, "body": None})],
)
def test_a_delete_has_an_old_row_only(kind: bytes, old: dict[str, object]) -> None:
    change = row_change(delete(texts("1", None, None), kind=kind))
    assert isinstance(change, Delete)
    assert (change.kind, change.old, change.new) == ("delete", old, None)


def test_a_truncate_is_one_for_each_table() -> None:
    other = relation([("id", 23)], oid=16401, name="u")
    message = b"T" + struct.pack("!IBII", 2, 3, 16400, 16401)
    (committed,) = feed_all([begin(), T, other, message, commit()])
    first, second = committed
    assert isinstance(first, Truncate)
    assert isinstance(second, Truncate)
    assert (first.table, second.table) == ("t", "u")
    assert (first.kind, first.schema, first.old, first.new) == ("truncate", "public", None, None)
    assert first.cascade
    assert first.restart_identity
    assert repr(first) == "<Truncate public.t>"


def test_an_emitted_message_has_prefix_and_content() -> None:
    change = one(b"M\x01" + bytes(8) + b"app\0" + struct.pack("!I", 3) + b"a\0b")
    assert isinstance(change, Emitted)
    assert (change.kind, change.prefix, change.content) == ("message", "app", b"a\0b")
    assert repr(change) == "<Emitted 'app', 3 bytes>"


def test_changes_with_the_same_table_and_rows_are_equal() -> None:
    assert row_change(insert(texts("1", "a", None))) == row_change(insert(texts("1", "a", None)))
    number = b"b", struct.pack("!i", 1)
    assert row_change(insert(texts("1", "a", None))) == row_change(
        insert([number, *texts("a", None)])
    )
    different = [
        row_change(insert(texts("1", "a", None))),
        row_change(insert(texts("2", "a", None))),
        row_change(insert(texts("1", "a", None)), relation([("id", 23), ("name", 25), ("body", 25)],
                                                           name="u")),
        row_change(update(texts("1", "a", None))),
        row_change(update(texts("1", "a", None), old=(b"K", texts("0", None, None)))),
        row_change(delete(texts("1", "a", None))),
        one(b"T" + struct.pack("!IBI", 1, 0, 16400)),
        one(b"T" + struct.pack("!IBI", 1, 1, 16400)),
        one(b"M\x01" + bytes(8) + b"app\0" + struct.pack("!I", 1) + b"a"),
        one(b"M\x01" + bytes(8) + b"app\0" + struct.pack("!I", 1) + b"b"),
    ]  # fmt: skip
    for place, change in enumerate(different):
        assert [change == other for other in different] == [
            n == place for n in range(len(different))
        ]
        with pytest.raises(TypeError, match="unhashable"):
            hash(change)


def test_changes_support_match_statements() -> None:
    def told(change: Change | Truncate | Emitted) -> str:
        match change:
            case Insert("t", {"name": name}):
                return f"+{name}"
            case Update("t", old, {"name": name}):
                return f"~{old}{name}"
            case Delete("t", {"id": number}):
                return f"-{number}"
            case Truncate("t"):
                return "0"
            case Emitted("app", content):
                return content.decode()
        return "?"

    assert told(one(insert(texts("1", "a", None)))) == "+a"
    assert told(one(update(texts("1", "b", None)))) == "~Noneb"
    assert told(one(delete(texts("7", None, None)))) == "-7"
    assert told(one(b"T" + struct.pack("!IBI", 1, 0, 16400))) == "0"
    assert told(one(b"M\x01" + bytes(8) + b"app\0" + struct.pack("!I", 1) + b"!")) == "!"


def test_a_change_is_decoded_once_and_only_on_access() -> None:
    broken = row_change(insert(texts("one", "a", None)))
    assert broken.table == "t"
    with pytest.raises(DecodeError, match=r"t\.id is not valid for its type"):
        assert broken.new
    change = row_change(insert(texts("1", "a", None)))
    assert change.new is change.new


# -- messages that are none ----------------------------------------------------------------------

ROW = row(texts("1", "a", None))
OID = struct.pack("!I", 16400)
BROKEN = {
    "insert without a row": b"I" + OID,
    "insert of an old row": b"I" + OID + b"K" + ROW,
    "insert with more": b"I" + OID + b"N" + ROW + b"x",
    "insert that ends early": b"I" + OID + b"N" + ROW[:-3],
    "insert of two columns": b"I" + OID + b"N" + row(texts("1", "a")),
    "update without a row": b"U" + OID,
    "update with the old row alone": b"U" + OID + b"O" + ROW,
    "update with two old rows": b"U" + OID + b"O" + ROW + b"K" + ROW,
    "update of an unknown kind": b"U" + OID + b"X" + ROW,
    "update with more": b"U" + OID + b"N" + ROW + ROW,
    "delete without a row": b"D" + OID,
    "delete of a new row": b"D" + OID + b"N" + ROW,
    "delete with more": b"D" + OID + b"K" + ROW + b"\0",
}


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN)
def test_an_invalid_row_message_is_an_error(message: bytes) -> None:
    change = row_change(message)
    for _ in range(2):  # it stays broken, however often it is asked
        with pytest.raises(DecodeError, match=r"public\.t"):
            assert change.new


@pytest.mark.parametrize("message", [b"I", b"U\0", b"D\0\0\x40"])
def test_a_row_message_without_a_table_is_an_error(message: bytes) -> None:
    (committed,) = feed_all([begin(), T, message, commit()])
    with pytest.raises(DecodeError, match="truncated"):
        list(committed)


def test_a_row_of_an_undescribed_table_is_an_error() -> None:
    (committed,) = feed_all([begin(), insert(texts("1")), commit()])
    with pytest.raises(DecodeError, match=r"not described before \(oid 16400\)"):
        list(committed)
    (committed,) = feed_all([begin(), b"T" + struct.pack("!IBI", 1, 0, 7), commit()])
    with pytest.raises(DecodeError, match=r"not described before \(oid 7\)"):
        list(committed)


# -- from a real server --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["false", "true"], ids=["text", "binary"])
@pytest.mark.parametrize(
    ("identity", "kind", "keys", "old"),
    [
        ("default", ReplicaIdentity.DEFAULT, {"id"}, {"id": 1}),
        ("using index t_code", ReplicaIdentity.INDEX, {"code"}, {"code": "x"}),
        (
            "full",
            ReplicaIdentity.FULL,
            {"id", "code", "name"},
            {"id": 1, "code": "x", "name": "a"},
        ),
    ],
)
def test_the_old_row_depends_on_the_replica_identity(
    recorder: Recorder,
    identity: str,
    kind: ReplicaIdentity,
    keys: set[str],
    old: dict[str, object],
    form: str,
) -> None:
    recorder.run(
        "create table t (id int primary key, code text not null, name text)",
        "create unique index t_code on t (code)",
    )
    recorder.connection.execute(f"alter table t replica identity {identity}".encode())
    slot = recorder.slot()
    recorder.transaction(
        "insert into t values (1, 'x', 'a')",
        "update t set name = 'b'",
        "update t set name = 'a'",
        "update t set id = 2, code = 'y'",
        "delete from t",
    )
    (committed,) = recorder.transactions(slot, binary=form)
    changes = [change for change in committed if isinstance(change, Change)]
    assert changes[0].relation.identity is kind
    assert {column.name for column in changes[0].relation.columns if column.key} == keys
    full = kind is ReplicaIdentity.FULL
    assert [(change.kind, change.old) for change in changes] == [
        ("insert", None),
        ("update", {"id": 1, "code": "x", "name": "a"} if full else None),
        ("update", {"id": 1, "code": "x", "name": "b"} if full else None),
        ("update", old),
        ("delete", {"id": 2, "code": "y", "name": "a"} if full else _moved(old)),
    ]
    assert changes[3].new == {"id": 2, "code": "y", "name": "a"}


def _moved(old: dict[str, object]) -> dict[str, object]:
    return {name: {"id": 2, "code": "y"}[name] for name in old}


def test_without_a_replica_identity_only_inserts_are_sent(recorder: Recorder) -> None:
    recorder.run("create table t (id int primary key)", "alter table t replica identity nothing")
    slot = recorder.slot()
    recorder.run("insert into t values (1)", "truncate t")
    assert recorder.changes(slot) == [("insert", "t", None, {"id": 1}), ("truncate", "t")]
    (first, _) = recorder.transactions(slot)
    (change,) = first
    assert isinstance(change, Insert)
    assert change.relation.identity is ReplicaIdentity.NOTHING


@pytest.mark.parametrize("form", ["false", "true"], ids=["text", "binary"])
@pytest.mark.parametrize("full", [False, True])
def test_unchanged_large_values_are_marked(recorder: Recorder, full: bool, form: str) -> None:
    recorder.run(
        "create table t (id int primary key, n int, body text)",
        "alter table t alter column body set storage external",
    )
    if full:
        recorder.run("alter table t replica identity full")
    slot = recorder.slot()
    recorder.run(
        "insert into t values (1, 1, repeat('x', 10000))",
        "update t set n = 2",
        "update t set body = 'short'",
    )
    body = "x" * 10_000
    inserted, counted, shortened = recorder.changes(slot, binary=form)
    assert inserted[3] == {"id": 1, "n": 1, "body": body}
    assert counted[3] == {"id": 1, "n": 2, "body": body if full else UNCHANGED}
    assert shortened[3] == {"id": 1, "n": 2, "body": "short"}
    assert (counted[2] is not None) is full


def test_a_truncate_of_several_tables(recorder: Recorder) -> None:
    recorder.run("create table t (id int primary key)", "create table u (id int references t)")
    slot = recorder.slot()
    recorder.run("truncate t, u restart identity cascade", "truncate u")
    both, single = recorder.transactions(slot)
    assert {(c.table, c.cascade, c.restart_identity) for c in both if isinstance(c, Truncate)} == {
        ("t", True, True),
        ("u", True, True),
    }
    assert [(c.table, c.cascade) for c in single if isinstance(c, Truncate)] == [("u", False)]


def test_columns_added_and_dropped_between_transactions(recorder: Recorder) -> None:
    recorder.run("create table t (id int primary key)")
    slot = recorder.slot()
    recorder.run(
        "insert into t values (1)",
        "alter table t add column name text default 'new'",
        "insert into t values (2)",
        "alter table t alter column name drop default, alter column name type int using 7",
        "insert into t values (3, 8)",
        "alter table t rename column name to size",
        "insert into t values (4, 9)",
        "alter table t drop column size",
        "insert into t values (5)",
        "alter table t rename to u",
        "insert into u values (6)",
    )
    wanted = [
        ("insert", "t", None, {"id": 1}),
        ("insert", "t", None, {"id": 2, "name": "new"}),
        ("insert", "t", None, {"id": 3, "name": 8}),
        ("insert", "t", None, {"id": 4, "size": 9}),
        ("insert", "t", None, {"id": 5}),
        ("insert", "u", None, {"id": 6}),
    ]
    for form in ("false", "true"):
        assert recorder.changes(slot, binary=form) == wanted
        # Also when all of them are kept, and looked at only in the end, from the last to the first.
        transactions = recorder.transactions(slot, binary=form)
        last_first = [change for txn in reversed(transactions) for change in txn]
        assert [change.new for change in last_first if isinstance(change, Insert)] == [
            new for *_, new in reversed(wanted)
        ]


@pytest.mark.parametrize("form", ["false", "true"], ids=["text", "binary"])
def test_columns_added_and_dropped_within_a_transaction(recorder: Recorder, form: str) -> None:
    recorder.run("create table t (id int primary key)", "alter table t replica identity full")
    slot = recorder.slot()
    recorder.transaction(
        "insert into t values (1)",
        "alter table t add column name text",
        "insert into t values (2, 'b')",
        "update t set name = 'a' where id = 1",
        "alter table t drop column name",
        "delete from t where id = 1",
        "alter table t add column name int default 5",
        "insert into t values (3)",
    )
    (committed,) = recorder.transactions(slot, binary=form)
    wanted = [
        (None, {"id": 1}),
        (None, {"id": 2, "name": "b"}),
        ({"id": 1, "name": None}, {"id": 1, "name": "a"}),
        ({"id": 1}, None),
        (None, {"id": 3, "name": 5}),
    ]
    for _ in range(2):  # it can be read more than once
        changes = [change for change in committed if isinstance(change, Change)]
        assert [(change.old, change.new) for change in changes] == wanted


def test_null_columns_outside_of_the_key_are_left_out_of_the_old_row(recorder: Recorder) -> None:
    """The server sends the other columns of an old key as null: they must not look like values."""
    recorder.run("create table t (a int, b text, c int, primary key (c, a))")
    slot = recorder.slot()
    recorder.run("insert into t values (1, 'x', 2)", "update t set c = 3", "delete from t")
    assert [(old, new) for _, _, old, new in recorder.changes(slot)] == [
        (None, {"a": 1, "b": "x", "c": 2}),
        ({"a": 1, "c": 2}, {"a": 1, "b": "x", "c": 3}),
        ({"a": 1, "c": 3}, None),
    ]


def test_a_row_with_only_a_null() -> None:
    assert row_change(insert([NULL]), relation([("id", 23)])).new == {"id": None}
