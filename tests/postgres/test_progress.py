"""The progress of a consumer with acknowledgements in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.postgres.consume._progress import Progress

pytestmark = pytest.mark.pure


def test_a_gap_holds_back_what_was_acknowledged_behind_it() -> None:
    progress = Progress(10)
    for end in (20, 30, 40):
        assert progress.given(end)
    assert not progress.ack(30)
    assert progress.acknowledged == 10
    assert progress.ack(20)
    assert progress.acknowledged == 30
    assert progress.outstanding == 1


def test_a_delivered_transaction_is_not_delivered_again() -> None:
    progress = Progress(10)
    assert progress.given(20)
    assert not progress.given(20)
    assert not progress.given(15)


def test_a_skipped_transaction_is_acknowledged_with_all_before_it() -> None:
    progress = Progress(10)
    progress.given(20)
    progress.passed(30)
    assert progress.acknowledged == 10
    progress.ack(20)
    assert progress.acknowledged == 30
    progress.passed(50)
    assert progress.acknowledged == 50


def test_any_number_of_skipped_transactions_is_one_entry() -> None:
    progress = Progress(10)
    progress.given(20)
    for end in range(30, 1000):
        progress.passed(end)
    assert len(progress._pending) == 2
    progress.given(1000)
    progress.ack(20)
    assert (progress.acknowledged, progress.delivered) == (999, 20)
    progress.ack(1000)
    assert (progress.acknowledged, progress.delivered) == (1000, 1000)


def test_after_a_rewind_unacknowledged_transactions_are_delivered_again() -> None:
    progress = Progress(10)
    progress.given(20)
    progress.given(30)
    progress.ack(20)
    progress.rewind()
    assert progress.outstanding == 0
    assert not progress.given(20)
    assert progress.given(30)


def test_an_acknowledgement_from_before_the_rewind_changes_nothing() -> None:
    progress = Progress(10)
    progress.given(20)
    progress.rewind()
    assert not progress.ack(20)
    assert progress.acknowledged == 10


def test_acknowledgements_of_another_process_are_taken_over() -> None:
    progress = Progress(10)
    for end in (20, 30, 40, 50):
        progress.given(end)
    progress.ack(40)
    progress.reached(30, 30)
    assert (progress.acknowledged, progress.delivered, progress.outstanding) == (40, 40, 1)
    progress.reached(20, 20)
    assert progress.acknowledged == 40
    assert not progress.given(50)
    progress.reached(70, 60)
    assert (progress.acknowledged, progress.delivered, progress.outstanding) == (70, 60, 0)
    assert not progress.given(70)
    assert progress.given(80)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.randoms())
def test_acknowledged_never_passes_an_outstanding_transaction(
    concerns: list[bool], chance: object
) -> None:
    progress = Progress(0)
    open_ends = []
    for number, concerned in enumerate(concerns, start=1):
        if concerned:
            progress.given(number)
            open_ends.append(number)
        else:
            progress.passed(number)
    chance.shuffle(open_ends)  # type: ignore[attr-defined]
    while open_ends:
        progress.ack(open_ends.pop())
        assert progress.acknowledged < min(open_ends, default=len(concerns) + 1)
    assert progress.acknowledged == len(concerns)
