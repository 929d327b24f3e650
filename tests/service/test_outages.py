"""The incidents of a service: their causes, their length and their cost."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Recorder
from moored.service._outages import PartOutages

pytestmark = pytest.mark.pure


class Incidents:
    """The outages of a service with a server, a pool and a broker, started in this order."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.recorder = Recorder(clock=self.clock)
        self.costs: Counter[str] = Counter()
        order = {"moored/server/run": 0, "db": 1, "db/connection": 2, "broker": 3}
        self.outages = PartOutages(
            self.recorder, self.clock, lambda: order, lambda: Counter(self.costs)
        )

    def fail(self, component: str, why: str) -> None:
        self.recorder.record(component, "failed", kind="failure", cause=why)


def test_the_cause_of_an_incident_is_the_failure_of_what_was_started_first() -> None:
    it = Incidents()
    it.fail("somewhere", "an old failure")
    it.clock.advance(5)
    for component in ("broker", "db", "db", "moored/server/run", "elsewhere"):
        it.fail(component, f"{component} is lost")
    it.fail("db/connection", "db is lost (OSError)")  # passed on
    it.outages.report("broker", "active", "degraded", "no source")
    it.outages.report("db", "active", "starting", "no connection")
    (incident,) = it.outages.as_list()
    assert incident["parts"] == {"broker": "degraded", "db": "starting"}
    assert incident["because"] == [
        "moored/server/run: moored/server/run is lost",
        "db: db is lost",
        "broker: broker is lost",
    ]


def test_the_cause_of_an_outage_is_no_later_failure_and_none_of_a_part_that_starts_later() -> None:
    it = Incidents()
    it.outages.report("db", "active", "starting", "no connection")
    it.fail("broker", "the outbox is not installed")
    it.outages.report("broker", "active", "degraded", "no source")
    it.clock.advance(5)
    it.fail("moored/server/run", "it was killed")
    assert list(it.outages.lines("db"))[1:] == ["  because  no connection"]
    assert list(it.outages.lines("broker"))[1:] == [
        "  because  broker: the outbox is not installed"
    ]
    it.outages.report("broker", "degraded", "active", "")
    it.outages.report("db", "starting", "active", "")
    assert list(it.outages.lines("db"))[1:] == ["  because  no connection"]
    assert it.outages.as_list()[0]["because"] == ["broker: the outbox is not installed"]


def test_a_later_failure_of_the_part_itself_is_a_cause_of_its_outage() -> None:
    it = Incidents()
    it.outages.report("db", "active", "degraded", "half of it is down")
    it.clock.advance(5)
    it.fail("db/connection", "silent for 8 s")
    it.fail("moored/server/run", "another failure")
    assert it.outages.as_list()[0]["because"] == ["db/connection: silent for 8 s"]


def test_a_part_that_has_not_worked_yet_is_not_the_cause_of_an_outage() -> None:
    it = Incidents()
    it.outages.report("db", "starting", "starting", "no connection")
    it.fail("db/connection", "db is down")
    it.outages.report("broker", "active", "degraded", "no source")
    assert list(it.outages.lines("broker"))[1:] == ["  because  no source"]
    it.outages.report("db", "starting", "active", "")
    assert list(it.outages.lines("broker"))[1:] == ["  because  db/connection: db is down"]


def test_an_incident_lasts_until_all_its_parts_work_again() -> None:
    it = Incidents()
    it.outages.report("db", "active", "starting", "no connection")
    it.clock.advance(1)
    it.outages.report("broker", "active", "degraded", "no source")
    it.outages.report("db", "starting", "active", "")
    it.clock.advance(2)
    assert it.outages.as_list()[0]["lasted"] is None
    it.outages.report("db", "active", "starting", "lost again")
    it.clock.advance(1)
    it.outages.report("db", "starting", "active", "")
    it.outages.report("broker", "degraded", "active", "")
    (incident,) = it.outages.as_list()
    assert incident["lasted"] == 4
    assert list(incident["parts"]) == ["db", "broker"]
    assert incident["lasted_of"] == {"db": 4, "broker": 3}
    assert "; all parts" not in next(it.outages.lines("db"))
    (first, *_) = it.outages.lines("broker")
    assert first.endswith("; all parts worked again 4.0 s after the first had stopped")
    assert incident["because"] == ["no connection"]
    it.outages.report("db", "active", "starting", "once more")
    assert [each["lasted"] for each in it.outages.as_list()] == [None, 4]
    assert "was degraded for 3.0 s" in next(it.outages.lines("broker"))
    assert "worked until" in next(it.outages.lines("db"))
    assert list(it.outages.lines("server")) == []


def test_an_outage_without_a_reason_shows_none() -> None:
    it = Incidents()
    it.outages.report("db", "active", "starting", "")
    assert it.outages.as_list()[0]["because"] == []
    assert len(list(it.outages.lines("db"))) == 1


def test_the_cost_of_an_incident_includes_what_was_lost_before_it_was_noticed() -> None:
    it = Incidents()
    it.costs["sends unknown"] = 7
    it.outages.report("db", "active", "active", "")
    it.clock.advance(0.2)
    it.costs["sends unknown"] += 1
    it.outages.report("db", "active", "starting", "no connection")
    it.costs["callers waited"] += 5
    assert it.outages.as_list()[0]["cost"] == {"sends unknown": 1, "callers waited": 5}
    it.outages.report("db", "starting", "active", "")
    it.costs["callers waited"] += 100  # after it
    assert it.outages.as_list()[0]["cost"] == {"sends unknown": 1, "callers waited": 5}
    assert list(it.outages.lines("db"))[-1] == "  cost     1 send unknown, 5 callers waited"
