"""The health of the service is the worst health of its parts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from moored.kernel import Condition
from moored.postgres import Health
from moored.service import HTTP, Status
from moored.service._health import PartHealth, worst

pytestmark = pytest.mark.pure

PAGE = (Path(__file__).parents[2] / "docs" / "operations" / "service.md").read_text()
WORDS: tuple[Status, ...] = get_args(Status)


def conditions(**met: bool) -> dict[str, Condition]:
    return {name: Condition(name, value, 0.0, None) for name, value in met.items()}


def test_the_table_of_the_docs_is_the_one_of_the_code() -> None:
    table = PAGE.partition("| status | HTTP |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)
    assert rows == [(word, str(code)) for word, code in HTTP.items()]


def test_the_states_are_those_of_postgres_in_the_same_order() -> None:
    assert tuple(HTTP) == WORDS == tuple(health.value for health in Health)


def test_the_worst_one_counts_and_its_code_is_never_better() -> None:
    assert worst([]) == "active"
    for one, other in itertools.product(WORDS, WORDS):
        both = worst([one, other])
        assert both == worst([other, one])
        assert HTTP[both] == max(HTTP[one], HTTP[other])


def test_the_health_of_a_part_that_reports_none_follows_its_conditions() -> None:
    health = PartHealth({"lamp": ("lit", "warm"), "http": ("ready",)})
    some = conditions(lit=True, warm=False, ready=True)
    assert health.states(some) == {"lamp": "starting", "http": "active"}
    assert health.status(some) == "starting"
    assert health.status(conditions(lit=True, warm=True, ready=True)) == "active"


def test_an_optional_part_makes_the_service_degraded_at_worst() -> None:
    health = PartHealth({"lamp": ("lit",), "http": ("ready",)}, optional=["lamp"])
    assert health.status(conditions(lit=False, ready=True)) == "degraded"
    assert health.status(conditions(lit=False, ready=False)) == "starting"
    assert health.worst_of(["http"], conditions(lit=False, ready=True)) == "active"
    assert health.worst_of(["http", "lamp"], conditions(lit=False, ready=True)) == "starting"


def test_the_health_that_a_part_reports_overrides_its_conditions() -> None:
    health = PartHealth({"lamp": ("lit",), "http": ("ready",)})
    health.report("lamp", "waiting")
    assert health.conditions("lamp") == ("lit",)
    assert health.status(conditions(lit=False, ready=True)) == "waiting"
    assert health.status(conditions(lit=False, ready=False)) == "starting"
    health.report("lamp", "failed")
    assert health.status(conditions(lit=False, ready=False)) == "failed"
