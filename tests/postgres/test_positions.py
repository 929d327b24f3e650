"""Flushed positions never pass an unacknowledged transaction, and never decrease."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moored.postgres import Lsn
from moored.postgres._lsn import LAST
from moored.postgres.decode._wire import PrimaryKeepalive
from moored.postgres.stream._positions import Positions
from moored.testing import scaled

pytestmark = pytest.mark.pure


def keepalive(positions: Positions, end: int, *, inside: bool = False, reply: bool = False) -> bool:
    return positions.keepalive(PrimaryKeepalive(Lsn(end), reply), inside=inside)


def test_a_transaction_is_received_at_once_and_flushed_when_it_is_acknowledged() -> None:
    positions = Positions(100)
    positions.committed(150)
    assert (positions.received, positions.flushed, positions.last_seen) == (149, 99, 150)
    assert not positions.up_to_date
    assert positions.acknowledged(150)
    assert (positions.received, positions.flushed) == (149, 149)
    assert positions.up_to_date


def test_a_repeated_acknowledgement_does_not_move_flushed() -> None:
    positions = Positions(100)
    positions.committed(150)
    assert positions.acknowledged(150)
    assert not positions.acknowledged(150)
    assert not positions.acknowledged(120)
    assert not positions.acknowledged(100)
    assert positions.flushed == 149


def test_a_keepalive_advances_both_positions_if_all_is_acknowledged() -> None:
    positions = Positions(100)
    assert keepalive(positions, 200)
    assert (positions.received, positions.flushed, positions.last_seen) == (199, 199, 200)
    assert not keepalive(positions, 200), "what is known already needs no answer"
    assert keepalive(positions, 200, reply=True), "unless it is wanted"


def test_a_keepalive_never_passes_what_is_not_acknowledged() -> None:
    positions = Positions(100)
    positions.committed(150)
    assert not keepalive(positions, 200)
    assert (positions.received, positions.flushed) == (199, 99)


def test_a_keepalive_within_a_transaction_moves_nothing() -> None:
    positions = Positions(100)
    assert not keepalive(positions, 200, inside=True)
    assert keepalive(positions, 200, inside=True, reply=True)
    assert (positions.received, positions.flushed) == (99, 99)


def test_a_repeated_keepalive_advances_after_the_acknowledgement() -> None:
    """WAL without changes for a consumer, then silence: the server need not retain it."""
    positions = Positions(100)
    positions.committed(150)
    keepalive(positions, 9_000)
    positions.acknowledged(150)
    assert keepalive(positions, 9_000)
    assert positions.flushed == 8_999


def test_positions_near_the_greatest_lsn() -> None:
    positions = Positions(LAST - 20)
    positions.committed(LAST - 10)
    positions.acknowledged(LAST - 10)
    keepalive(positions, LAST)
    assert (positions.received, positions.flushed) == (LAST - 1, LAST - 1)
    assert len(positions.status(0.0)) == 34


def test_positions_at_lsn_zero() -> None:
    positions = Positions(0)
    assert positions.up_to_date
    assert not keepalive(positions, 0)
    assert positions.status(0.0)[1:25] == bytes(24)


class Stream(RuleBasedStateMachine):
    """A server that writes, sends and is told; and a consumer that acknowledges when it likes.

    Transactions are told apart by their ends. What the server forgets is everything before
    `flushed + 1`: a transaction that ends there or before is never sent again. A transaction is
    sent after it was committed, so when its first bytes arrive its end lies in the log already.
    """

    @initialize(start=st.integers(0, 1000))
    def begin(self, start: int) -> None:
        self.positions = Positions(start)
        self.written = start
        self.arriving: int | None = None
        self.unacknowledged: list[int] = []
        self.before = (start - 1, start - 1)

    @rule(size=st.integers(1, 100))
    def somebody_writes_what_concerns_nobody(self, size: int) -> None:
        self.written += size

    @precondition(lambda self: self.arriving is None)
    @rule(size=st.integers(1, 100))
    def a_transaction_begins_to_arrive(self, size: int) -> None:
        self.written += size
        self.arriving = self.written

    @precondition(lambda self: self.arriving is not None)
    @rule()
    def it_is_complete(self) -> None:
        assert self.arriving is not None
        self.positions.committed(self.arriving)
        self.unacknowledged.append(self.arriving)
        self.arriving = None

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data())
    def some_are_acknowledged(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.unacknowledged)))
        end = self.unacknowledged[count - 1]
        del self.unacknowledged[:count]
        assert self.positions.acknowledged(end)
        assert not self.positions.acknowledged(end)

    @rule(reply=st.booleans())
    def a_keepalive(self, reply: bool) -> None:
        flushed, inside = self.positions.flushed, self.arriving is not None
        told = keepalive(self.positions, self.written, inside=inside, reply=reply)
        assert told is (reply or self.positions.flushed > flushed)
        if not inside and not self.unacknowledged:
            assert self.positions.flushed == self.written - 1, "a quiet database moves on"

    @rule(back=st.integers(0, 500))
    def something_old_is_said_again(self, back: int) -> None:
        self.positions.acknowledged(self.positions.flushed + 1 - back)
        self.positions.committed(self.positions.last_seen - back)

    @invariant()
    def nothing_needed_is_forgotten(self) -> None:
        needed = [*self.unacknowledged, *([] if self.arriving is None else [self.arriving])]
        assert all(self.positions.flushed + 1 < end for end in needed)
        assert self.positions.up_to_date is not bool(self.unacknowledged)

    @invariant()
    def neither_goes_back(self) -> None:
        now = self.positions.received, self.positions.flushed
        assert all(new >= old for new, old in zip(now, self.before, strict=True))
        self.before = now

    @invariant()
    def nothing_is_flushed_that_was_not_received(self) -> None:
        assert self.positions.flushed <= self.positions.received < max(self.written, 1)


Stream.TestCase.settings = settings(max_examples=scaled(600, least=20), deadline=None)
TestStream = Stream.TestCase
