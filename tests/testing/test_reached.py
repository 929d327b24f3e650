"""`assert_reached` fails for a condition that no schedule of a simulation has reached."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.reached import assert_reached

from moored.testing import Sim

pytestmark = pytest.mark.pure


async def scenario(sim: Sim) -> Counter[str]:
    return Counter({"often": 1, "sometimes": sim.seed % 3 == 2, "never": 0})


def test_conditions_that_some_schedule_has_reached_pass() -> None:
    assert_reached(scenario, {"often", "sometimes"}, within=3)


def test_a_condition_that_no_schedule_has_reached_is_named() -> None:
    with pytest.raises(AssertionError, match=r"never reached in 9 schedules: \['never'\]"):
        assert_reached(scenario, {"often", "never"}, within=9)
