"""The history: rows of numbers, gaps, the last hour, lanes of states, and what it costs."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from math import isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.service._history import CHANGES, COARSE, FINE, MAX_SERIES, MERGED, STEP, History, packed
from moored.testing import scaled

pytestmark = pytest.mark.pure

#: When the process began: not a multiple of the step.
BEGAN = 1001.3


def written(ticks: int, **series: float) -> History:
    history = History(BEGAN)
    for number in range(ticks):
        history.write(BEGAN + number * STEP, {name: number * by for name, by in series.items()})
    return history


def test_a_span_has_its_last_rows() -> None:
    rows = written(100, db=1.0).rows(120)
    assert (rows.first, rows.step) == (BEGAN + 40 * STEP, STEP)
    assert list(rows.values["db"]) == list(map(float, range(40, 100)))
    assert not rows.most


def test_a_young_process_has_fewer_rows() -> None:
    rows = written(3, db=1.0).rows(900)
    assert (rows.first, list(rows.values["db"])) == (BEGAN, [0.0, 1.0, 2.0])


def test_ticks_that_are_late_are_in_their_row_and_missed_ones_are_gaps() -> None:
    history = History(BEGAN)
    for at, value in ((0.1, 1.0), (2.3, 2.0), (8.9, 3.0), (9.1, 4.0)):
        history.write(BEGAN + at, {"db": value})
    found = [None if isnan(each) else each for each in history.rows(120).values["db"]]
    assert found == [1.0, 2.0, None, None, 3.0, 4.0]
    assert history.rows(120).first == BEGAN


def test_a_number_that_begins_or_ends_has_gaps_around_it() -> None:
    history = History(BEGAN)
    for number, values in enumerate(({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0})):
        history.write(BEGAN + number * STEP, values)
    found = history.rows(120).values
    assert isnan(found["a"][2])
    assert isnan(found["b"][0])
    assert list(found["b"][1:]) == [3.0, 4.0]


def test_the_last_hour_has_the_least_and_the_most_of_each_step() -> None:
    history = written(MERGED * 3 + 4, db=1.0)
    rows = history.rows(3600)
    assert (rows.first, rows.step) == (BEGAN, STEP * MERGED)
    assert list(rows.values["db"]) == [0.0, 10.0, 20.0]
    assert list(rows.most["db"]) == [9.0, 19.0, 29.0]


def test_old_rows_are_dropped() -> None:
    history = written(COARSE * MERGED + 37, db=1.0)
    assert len(history.rows(900).values["db"]) == FINE
    rows = history.rows(3600)
    assert len(rows.values["db"]) == COARSE
    assert rows.first == BEGAN + 30 * STEP
    assert rows.values["db"][0] == 30.0


def test_a_pause_longer_than_the_history_leaves_gaps_alone() -> None:
    history = written(20, db=1.0)
    history.write(BEGAN + 100_000 * STEP, {"db": 7.0})
    rows = history.rows(120)
    assert rows.values["db"][-1] == 7.0
    assert all(map(isnan, rows.values["db"][:-1]))
    assert rows.first == BEGAN + (100_001 - 60) * STEP


@settings(max_examples=scaled(500, least=30), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(-1e6, 1e6, width=32)), max_size=60))
def test_the_hour_and_the_quarter_agree(ticks: list[tuple[int, float]]) -> None:
    history, number, truth = History(BEGAN), 0, dict[int, float]()
    for pause, value in ticks:
        number += pause
        history.write(BEGAN + number * STEP, {"db": value})
        truth[number] = value
    fine, coarse = history.rows(900), history.rows(3600)
    for place, value in enumerate(fine.values.get("db", ())):
        at = round((fine.first - BEGAN) / STEP) + place
        assert value == truth[at] if at in truth else isnan(value)
    for place, value in enumerate(coarse.values.get("db", ())):
        first = round((coarse.first - BEGAN) / STEP) + place * MERGED
        inside = [truth[each] for each in range(first, first + MERGED) if each in truth]
        assert value == min(inside) if inside else isnan(value)
        assert not inside or coarse.most["db"][place] == max(inside)


def test_a_lane_has_the_state_at_the_begin_of_a_span_and_each_change() -> None:
    history = written(100, db=1.0)
    for at, state, incident in (
        *((0.0, "starting", None), (5.0, "works", None), (150.0, "works", None)),
        *((160.0, "waits", 7), (170.0, "works", None)),
    ):
        history.add(BEGAN + at, "db", state, incident)
    known = {"db": {"title": "in use"}}
    found = history.as_dict(120, 5000.0, known)
    assert found["lanes"] == {
        "db": [[5005.0, "works", None], [5160.0, "waits", 7], [5170.0, "works", None]]
    }
    assert found["from"] == pytest.approx(5080.0)
    assert found["series"]["db"].keys() == {"title", "values"}


def test_a_lane_keeps_its_last_changes() -> None:
    history = History(BEGAN)
    for number in range(CHANGES * 3):
        history.add(BEGAN + number, "db", ("works", "down")[number % 2])
    found = list(history.lanes["db"].since(BEGAN))
    assert len(found) == CHANGES
    assert found[-1] == (BEGAN + CHANGES * 3 - 1, "down", None)


def test_values_are_packed_little_endian() -> None:
    assert b64decode(packed(array("f", [1.0]))) == b"\x00\x00\x80?"
    assert isnan(array("f", b64decode(packed(array("f", [nan]))))[0])


def test_a_hundred_parts_take_at_most_two_megabytes() -> None:
    history = History(BEGAN)
    row = {f"part{n % 100}.number{n // 100}": float(n) for n in range(MAX_SERIES + 50)}
    for number in range(COARSE * MERGED):
        history.write(BEGAN + number * STEP, row)
    for part in range(100):
        for number in range(CHANGES):
            history.add(BEGAN + number, f"part{part}", ("works", "down")[number % 2])
    assert len(history.rows(120).values) == MAX_SERIES  # further series are not kept
    assert sys.getsizeof(history) < 2_000_000
