"""Batches of messages give the same transactions as single messages."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.postgres.recording import (
    begin,
    commit,
    delete,
    framed,
    insert,
    relation,
    summary,
    texts,
    update,
)

from moored.postgres import DecodeError
from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._body import Body, Shelf
from moored.postgres.decode._transaction import Committed
from moored.testing import scaled

pytestmark = pytest.mark.pure

often = settings(max_examples=scaled(1_000, least=20), deadline=None)
KEEPALIVE = struct.pack("!cQqB", b"k", 0x2000, 0, 0)
COLUMNS = [("id", 23, True), ("name", 25, False)]

#: How many rows each transaction has, and whether the table is described again in it.
shapes = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12)


def stream(sizes: list[tuple[int, bool]]) -> list[bytes]:
    """The messages of transactions of these sizes."""
    found, number = [framed(relation(COLUMNS))], 0
    for xid, (size, described) in enumerate(sizes, 700):
        place = 0x1000 * xid
        found.append(framed(begin(xid, place)))
        for nth in range(size):
            number += 1
            values = texts(str(number), "x" * (number % 50))
            kinds = (insert(values), update(values), delete(values))
            found.append(framed(kinds[number % 3]))
            if described and nth == size // 2:
                found.append(framed(relation(COLUMNS)))
        found.append(framed(commit(place, place + 0x30)))
    return found


def told(committed: Committed) -> tuple[object, ...]:
    """All fields and changes of a transaction."""
    changes = [summary(change) for change in committed]
    return committed.xid, committed.end_lsn, committed.body.size, committed.body.count, changes


def fed(assembler: Assembler, batch: list[bytes]) -> tuple[list[Committed], int]:
    """The transactions and the keepalives in a batch."""
    place, keepalives = 0, 0
    found: list[Committed] = []
    while place < len(batch):
        done, place = assembler.feed_all(batch, place)
        found += done
        if place < len(batch) and batch[place] == KEEPALIVE:
            keepalives += 1
            place += 1
    return found, keepalives


@often
@given(shapes, st.lists(st.integers(min_value=0)), st.lists(st.integers(min_value=0)))
def test_batches_and_single_messages_give_the_same_transactions(
    sizes: list[tuple[int, bool]], keepalives: list[int], places: list[int]
) -> None:
    messages, one = stream(sizes), Assembler()
    wanted = [told(each) for each in map(one.feed, messages) if each is not None]
    for place in keepalives:
        messages.insert(place % (len(messages) + 1), KEEPALIVE)
    cuts = sorted({place % (len(messages) + 1) for place in places} | {0, len(messages)})
    found: list[tuple[object, ...]] = []
    other, count = Assembler(), 0
    for a, b in pairwise(cuts):
        done, seen = fed(other, messages[a:b])
        found += [told(each) for each in done]
        count += seen
    assert found == wanted
    assert count == len(keepalives)
    assert other.inside is one.inside


def test_large_transactions_in_batches_go_to_a_file(tmp_path: Path) -> None:
    assembler = Assembler(lambda: Body(Shelf(tmp_path, 1_000)))
    messages = stream([(3, False), (40, True)])
    small, large = fed(assembler, messages)[0]
    assert (bool(small.body.spilled), bool(large.body.spilled)) == (False, True)
    plain = fed(Assembler(), messages)[0]
    assert [told(small), told(large)] == [told(each) for each in plain]


@pytest.mark.parametrize(
    "wrong",
    [
        framed(insert(texts("1", "a"))),
        framed(b"q"),
        framed(commit()),
        framed(b""),
        framed(begin())[:-1],
    ],
    ids=["row", "unknown", "commit", "empty", "short"],
)
@pytest.mark.parametrize("more", [[], [framed(begin(900))]], ids=["last", "not last"])
def test_transactions_before_an_invalid_message_are_not_lost(
    wrong: bytes, more: list[bytes]
) -> None:
    messages = stream([(1, False), (2, False)])
    batch, assembler = [*messages, wrong, *more], Assembler()
    done, place = assembler.feed_all(batch)
    assert [each.xid for each in done] == [700, 701]
    assert place == len(messages)
    for _ in range(2):
        with pytest.raises(DecodeError):
            assembler.feed_all(batch, place)
