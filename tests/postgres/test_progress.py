"""How far a consumer is, whatever the order of its acknowledgements."""

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


def test_what_was_given_is_not_given_again() -> None:
    progress = Progress(10)
    assert progress.given(20)
    assert not progress.given(20)
    assert not progress.given(15)


def test_what_does_not_concern_it_is_passed_once_all_before_it_is_acknowledged() -> None:
    progress = Progress(10)
    progress.given(20)
    progress.passed(30)
    assert progress.acknowledged == 10
    progress.ack(20)
    assert progress.acknowledged == 30
    progress.passed(50)
    assert progress.acknowledged == 50


def test_who_comes_back_gets_again_what_it_has_not_acknowledged() -> None:
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


def test_what_another_process_has_acknowledged_is_done_and_the_rest_does_not_come_again() -> None:
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
def test_acknowledged_never_passes_one_that_is_open(concerns: list[bool], chance: object) -> None:
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
