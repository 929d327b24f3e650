"""The barrier: in no order of the steps of publishers and a reader is an event missed."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations_with_replacement

import pytest
from tests.soaking import some_of

from moored.postgres.outbox._barrier import Barrier
from moored.testing import scaled

from .barrier_model import SCRIPTS, Look, Reader, explore

pytestmark = pytest.mark.pure

#: The real one, also while another one is planted.
LOOK: Look = Barrier.look

ALL = list(combinations_with_replacement(SCRIPTS, 2))
POLLS = 3 if scaled(100) >= 100 else 2


@pytest.mark.parametrize(
    "scripts",
    some_of(
        [*ALL, ("two events", "two events", "prepared"), ("prepared", "prepared", "savepoint")],
        ("two events", "two events"),
        ("two events", "prepared"),
        ("two events", "prepared, then a restart"),
    ),
    ids=" and ".join,
)
def test_no_order_of_the_steps_misses_an_event(scripts: tuple[str, ...]) -> None:
    states, missed = explore(scripts, POLLS)
    assert missed == ""
    assert states > 1_000


@pytest.mark.parametrize("scripts", some_of(ALL, ("two events", "prepared")), ids=" and ".join)
def test_a_restart_of_the_reader_misses_nothing(scripts: tuple[str, ...]) -> None:
    assert explore(scripts, POLLS, Reader(restarts=True))[1] == ""


def without_bounds(barrier: Barrier, highest: int, holders: Collection[str]) -> Barrier:
    """Judge the holders by the last look alone."""
    return LOOK(barrier._replace(bounds=()), highest, holders)


def without_between(barrier: Barrier, highest: int, holders: Collection[str]) -> Barrier:
    """Take `B/0` for a holder like any other."""
    return LOOK(barrier, highest, [name.replace("/0", "/none") for name in holders])


def without_renaming(barrier: Barrier, highest: int, holders: Collection[str]) -> Barrier:
    """Take a prepared transaction after a restart for a new one."""
    return LOOK(barrier, highest, [name.replace("-1/", "9/") for name in holders])


def without_holders(barrier: Barrier, highest: int, holders: Collection[str]) -> Barrier:
    """Read everything that is visible: `id > last`."""
    return LOOK(barrier, highest, ())


PAIR = "two transactions", "two events"


@pytest.mark.parametrize(
    ("scripts", "reader"),
    [
        pytest.param(PAIR, Reader(order="rmh"), id="the rows before the holders"),
        pytest.param(PAIR, Reader(order="mrh"), id="the rows with the snapshot of the holders"),
        pytest.param(PAIR, Reader(order="hmr"), id="the holders before the highest id"),
        pytest.param(PAIR, Reader(without_holders), id="id > last"),
        pytest.param(PAIR, Reader(without_bounds), id="no bound is kept"),
        pytest.param(("two events", "prepared"), Reader(without_between), id="B/0"),
        pytest.param(
            ("two events", "prepared, then a restart"), Reader(without_renaming), id="-1/xid"
        ),
    ],
)
def test_the_model_catches_a_wrong_reader(scripts: tuple[str, ...], reader: Reader) -> None:
    assert "is missed" in explore(scripts, 3, reader)[1]


def test_the_holder_with_the_lowest_bound_is_the_one_that_events_wait_for() -> None:
    barrier = Barrier.at(5).look(9, ["3/4"]).look(12, ["4/1", "3/4"])
    assert (barrier.final, barrier.holder) == (5, "3/4")
    barrier = barrier.look(12, ["4/1"])
    assert (barrier.final, barrier.holder) == (9, "4/1")
    assert barrier.look(12, []).holder is None


def test_what_is_final_stays_final() -> None:
    barrier = Barrier.at(5).look(9, [])
    assert barrier.look(0, ["3/4"]).final == 9, "partitions were dropped"
