"""The incidents of a service: roots, lengths, causes, costs, and the words for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.kernel.fake_clock import NOON, FakeClock
from tests.leases.virtual import in_virtual_time

from moored.kernel import Callers, Clock, Link, Recorder, StatusMonitor, Tree
from moored.service._health import PartHealth, Status
from moored.service._truth import Truth
from moored.testing import Sim

pytestmark = pytest.mark.pure

DB, GRPC = "10.0.0.1:5432", "10.0.0.2:50051"
TIES = {
    "server": [],
    "db": [DB],
    "postgres": [DB],
    "live": ["postgres"],
    "load": ["db", "grpc", "chat"],
    "grpc-server": [],
    "grpc": [GRPC],
    "chat": [],
}


class Pool:
    """The system of a part, with a link to one server."""

    def __init__(self, clock: FakeClock, server: str, **link: Any) -> None:
        self._clock = clock
        self.link = Link(server, True, 0.0, **link)
        self.hears = True
        self.callers = Callers()
        self.lost = 0

    def links(self) -> list[Link]:
        if self.hears:
            self.link = self.link._replace(heard_at=self._clock.monotonic())
        return [self.link]

    def lose(self, *, silent: bool = False, why: str = "reset by peer") -> None:
        self.hears = False
        self.link = self.link._replace(up=False, silent=silent, why=why)

    def find(self) -> None:
        self.hears = True
        self.link = self.link._replace(up=True, silent=False, why="")

    def hanging(self) -> Callers:
        return self.callers

    def costs(self) -> Counter[str]:
        return Counter({"reads failed": self.lost})

    def statistics(self) -> dict[str, Any]:
        return {}

    def explain(self) -> str:
        return ""

    def tree(self) -> Tree:
        return Tree("", "running", 0.0)


class World:
    """The parts of the demo, in virtual time; a look every quarter of a second."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        health = PartHealth(
            {part: (f"{part}_ready",) for part in TIES}, optional=["live", "grpc", "chat"]
        )
        self.recorder = Recorder(clock=self.clock)
        conditions = [f"{part}_ready" for part in TIES]
        self.monitor: StatusMonitor[Status] = StatusMonitor(
            conditions, health.status, clock=self.clock, recorder=self.recorder
        )
        self.db = Pool(self.clock, DB, kind="PostgreSQL")
        self.stream = Pool(self.clock, DB, kind="PostgreSQL", of="change stream")
        self.grpc = Pool(self.clock, GRPC, kind="gRPC server")
        systems = {
            "app/db/pool": self.db,
            "app/postgres/manager": self.stream,
            "app/grpc/channel": self.grpc,
        }
        self.health = health
        self.truth = Truth(
            health,
            self.monitor,
            self.recorder,
            self.clock,
            ties=TIES,
            runs={DB: "server", GRPC: "grpc-server"},
            systems=systems,
            keeping=["postgres", "live"],
            started=lambda: True,
        )
        for part in TIES:
            self.report(part, "active")
        self.wait(2.0)

    def report(self, part: str, state: Status, detail: str = "") -> None:
        before = self.health.states(self.monitor.conditions())[part]
        self.health.report(part, state, self.clock.monotonic())
        self.truth.report(part, before, state, detail)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)
            self.truth.look()

    @property
    def now(self) -> dict[str, Any]:
        """The newest incident."""
        return self.truth.incidents()[0]

    def states(self) -> dict[str, str]:
        return {n: j.state for n, j in self.truth.judged().items() if j.state != "works"}


class CountedLooks(Truth):
    looks = 0

    def look(self) -> None:
        self.looks += 1
        super().look()


@in_virtual_time
async def test_reports_of_many_parts_at_once_are_judged_once(sim: Sim) -> None:
    names = [f"part-{number}" for number in range(500)]
    health = PartHealth({name: (f"{name}_ready",) for name in names})
    clock = Clock.current()
    recorder = Recorder(clock=clock)
    monitor: StatusMonitor[Status] = StatusMonitor(
        [f"{name}_ready" for name in names], health.status, clock=clock, recorder=recorder
    )
    truth = CountedLooks(health, monitor, recorder, clock, ties={name: [] for name in names})
    truth.start()
    truth.looks = 0
    for name in names:
        health.report(name, "active", clock.monotonic())
        truth.report(name, "starting", "active", "")
    await asyncio.sleep(0.1)
    assert truth.looks == 1
    assert {each.state for each in truth.judged().values()} == {"works"}
    truth.stop()


def test_a_silent_server_is_one_incident_that_begins_with_its_last_sign_of_life() -> None:
    it = World()
    it.db.hears = it.stream.hears = False
    it.wait(3.0)
    assert it.truth.incidents() == []
    it.db.lose(silent=True)
    it.wait(1.0)
    it.stream.lose(silent=True)
    it.wait(2.0)
    (found,) = it.truth.incidents()
    assert (found["id"], found["root"], found["state"]) == (1, "server", "down")
    assert found["what"] == "PostgreSQL does not answer"
    assert found["sign_of_life"] == NOON + 2.0
    assert found["noticed"] == NOON + 5.25
    assert found["lasted"] == 6.0
    waits = dict.fromkeys(("db", "postgres", "live", "load"), "waits")
    assert it.states() == {"server": "down", **waits}
    assert found["parts"]["server"] == [[NOON + 2, None, "down"]]
    assert set(found["parts"]) == {"server", *waits}
    it.db.find()
    it.stream.find()
    it.wait(0.25)
    (over,) = it.truth.incidents()
    assert over["lasted"] == 6.25
    assert over["what"] == "PostgreSQL did not answer"
    assert over["parts"]["db"] == [[NOON + 2, NOON + 8.25, "waits"]]
    assert it.states() == {}
    it.wait(5.0)
    assert it.truth.incidents()[0]["lasted"] == 6.25


def test_the_root_moves_to_the_server_when_that_turns_out_to_be_down() -> None:
    it = World()
    it.stream.lose()
    it.wait(0.25)
    assert (it.now["root"], it.now["what"]) == (
        "postgres",
        "postgres has lost its change stream to PostgreSQL",
    )
    it.report("server", "starting", "it has ended with status 0")
    it.wait(0.25)
    (found,) = it.truth.incidents()
    assert (found["id"], found["root"]) == (1, "server")
    assert found["what"] == "PostgreSQL has ended, and is coming back"
    assert found["why"] == "It has ended with status 0."
    assert found["do"] == {"text": "Nothing: Moored starts it again.", "command": None, "note": ""}
    assert next(iter(found["parts"])) == "server"
    # It is back, and the stream follows a second later: that is the same incident.
    it.report("server", "active")
    it.wait(1.0)
    assert it.states() == {"postgres": "waits", "live": "waits"}
    it.stream.find()
    it.wait(0.25)
    assert it.now["lasted"] == 1.75
    assert [words for _, words in it.now["steps"]] == [
        "postgres has lost its change stream to PostgreSQL",
        "live waits for postgres",
        "PostgreSQL has ended, and is coming back",
        "db waits for PostgreSQL",
        "postgres waits for PostgreSQL",
        "load waits for db",
        "PostgreSQL works again",
        "db works again",
        "load works again",
        "postgres works again",
        "live works again",
        "all work again, after 1.8 s",
    ]


def test_an_incident_whose_root_moves_begins_with_the_last_sign_of_life_of_the_new_root() -> None:
    it = World()
    it.db.hears = it.stream.hears = False
    it.wait(3.0)
    it.report("live", "degraded", "events arrive late")
    it.wait(1.0)
    assert (it.now["root"], it.now["sign_of_life"]) == ("live", NOON + 5.0)
    it.db.lose(silent=True)
    it.stream.lose(silent=True)
    it.wait(0.25)
    (found,) = it.truth.incidents()
    assert (found["root"], found["sign_of_life"], found["lasted"]) == ("server", NOON + 2, 4.25)
    assert found["parts"]["server"] == [[NOON + 2, None, "down"]]


def test_what_does_not_come_back_after_its_root_is_named_in_the_answer() -> None:
    it = World()
    it.report("server", "starting", "ended")
    it.stream.lose(why="the slot is gone")
    it.wait(1.0)
    it.report("server", "active")
    it.wait(9.0)
    assert len(it.truth.incidents()) == 1
    it.wait(2.0)
    assert it.states() == {"postgres": "down", "live": "waits"}
    answer = it.truth.answer()
    assert (answer["node"], answer["incident"]) == ("postgres", 2)
    assert answer["what"] == "postgres has lost its change stream to PostgreSQL."
    # From the return of its root on, it is an outage of its own.
    second, first = it.truth.incidents()
    assert (first["root"], first["lasted"]) == ("server", 1.25)
    assert first["steps"][-1][1] == "what still fails is outage 2"
    assert second["sign_of_life"] == first["ended"]
    assert second["lasted"] == 10.75
    it.stream.find()
    it.wait(3.0)
    assert [each["root"] for each in it.truth.incidents()] == ["postgres", "server"]


def test_an_outage_beside_a_part_that_has_long_been_degraded_is_one_of_its_own() -> None:
    it = World()
    it.report("live", "degraded", "1 item parked")
    it.wait(40.0)
    for number in (2, 3):
        it.report("server", "starting", "ended")
        it.wait(5.0)
        assert (it.now["id"], it.now["root"]) == (number, "server")
        assert it.truth.answer()["also"] == ["live works only in part"]
        it.report("server", "active")
        it.wait(15.0)
        assert it.states() == {"live": "degraded"}
        assert it.truth.answer()["what"] == "live works only in part."
        assert it.now["lasted"] == 5.25
    it.report("live", "active")
    it.wait(3.0)
    numbers, seconds, _ = it.truth.totals()
    assert numbers == {"live": 1, "server": 2}
    assert seconds["server"] == 10.5
    assert seconds["live"] == pytest.approx(80.0, abs=1.0)


def test_a_degraded_part_that_fails_first_does_not_make_the_outage_longer() -> None:
    it = World()
    it.report("load", "degraded", "the file is late")
    it.wait(60.0)
    failed = it.clock.monotonic()
    it.report("load", "starting", "its connection is closed")
    it.wait(0.25)
    it.db.lose(why="refused")
    it.stream.lose(why="refused")
    it.wait(5.0)
    it.db.find()
    it.stream.find()
    it.report("load", "degraded", "the file is late")
    it.wait(1.0)
    assert all(each["sign_of_life"] >= NOON + failed for each in it.truth.incidents()[:-1])
    first = it.truth.incidents()[-1]
    assert (first["root"], first["state"]) == ("load", "down")


def test_a_link_that_was_silent_before_another_one_was_lost_makes_the_outage_begin_earlier() -> (
    None
):
    it = World()
    it.db.hears = it.stream.hears = False
    it.wait(0.25)
    it.db.hears = True
    it.wait(6.0)
    it.stream.link = it.stream.link._replace(vital=False, up=False, why="reset by peer", of="pool")
    it.wait(3.0)
    it.stream.link = it.stream.link._replace(vital=True, silent=True, of="change stream")
    it.wait(1.0)
    assert it.now["what"] == "postgres gets no answer on its change stream"
    assert it.now["sign_of_life"] == it.now["parts"]["postgres"][0][0] == NOON + 2.0


def test_the_answer_says_that_the_root_is_back_while_others_come_back() -> None:
    it = World()
    it.report("server", "starting", "ended")
    it.stream.lose(why="reset by peer")
    it.wait(1.0)
    it.report("server", "active")
    it.wait(1.0)
    answer = it.truth.answer()
    assert answer["what"] == "PostgreSQL works again; coming back: postgres, live."
    assert answer["do"]["text"] == "Nothing: Moored connects again by itself."


def test_other_trouble_just_after_an_outage_is_another_outage() -> None:
    it = World()
    it.report("live", "starting", "it failed")
    it.wait(0.5)
    it.report("live", "active")
    it.wait(1.5)
    it.db.lose(why="refused")
    it.wait(60.0)
    assert [each["root"] for each in it.truth.incidents()] == ["db", "live"]
    assert it.truth.incidents()[1]["lasted"] < 1.0


def test_idle_time_before_a_connection_is_lost_is_no_outage() -> None:
    it = World()
    it.db.hears = it.stream.hears = False
    it.wait(600.0)
    it.db.lose(why="connection refused")
    it.stream.lose(why="connection refused")
    it.wait(2.0)
    assert it.now["what"] == "PostgreSQL cannot be reached"
    assert it.now["lasted"] == 2.0


def test_a_part_that_has_failed_for_good_is_down_although_no_link_is_lost() -> None:
    it = World()
    it.report("db", "failed", "wrong password")
    it.wait(1.0)
    assert it.truth.judged()["db"].state == "down"
    assert it.truth.answer()["what"] == "db has failed for good."


def test_a_part_that_has_long_been_degraded_and_then_fails_is_down() -> None:
    it = World()
    it.health.report("chat", "degraded", it.clock.monotonic())
    it.wait(15.0)
    it.report("chat", "starting", "it failed")
    it.wait(1.0)
    assert it.states() == {"chat": "down", "load": "waits"}
    assert it.now["ended"] is None


def test_an_open_incident_is_kept_however_many_follow() -> None:
    it = World()
    it.report("chat", "starting", "it failed")
    it.wait(1.0)
    for _ in range(510):
        it.report("grpc-server", "starting", "killed")
        it.wait(0.25)
        it.report("grpc-server", "active")
        it.wait(2.25)
    (open_,) = [each for each in it.truth.incidents() if each["ended"] is None]
    assert (open_["id"], open_["root"]) == (1, "chat")
    numbers, _, _ = it.truth.totals()
    assert numbers["grpc-server"] == 510
    assert numbers["chat"] == 0


async def test_a_long_story_has_its_end() -> None:
    it = World()
    it.report("chat", "starting", "it failed")
    it.truth.start()
    for number in range(50):
        it.recorder.record("chat", "failed", kind="failure", cause=f"reason {number}")
        it.wait(0.25)
    it.report("chat", "active")
    it.wait(0.25)
    steps = [text for _, text in it.now["steps"]]
    assert len(steps) == 30
    assert steps[0].startswith("chat has failed")
    assert steps[-1].startswith("all work again")
    it.truth.stop()


async def test_the_reason_of_an_outage_is_the_same_while_it_lasts_and_later() -> None:
    it = World()
    it.truth.start()
    it.report("chat", "starting")
    it.recorder.record("chat", "failed", kind="failure", cause="disk full (OSError)")
    it.wait(1.0)
    before = it.now["why"]
    it.report("chat", "active")
    it.wait(1.0)
    assert before == it.now["why"] == "Disk full."
    it.truth.stop()


def test_a_method_of_a_system_that_fails_stops_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = World()

    def costs() -> Counter[str]:
        raise ValueError("no such number")

    it.db.costs = costs  # type: ignore[method-assign]
    it.stream.lose()
    it.wait(3.0)
    assert it.now["root"] == "postgres"
    assert caplog.text.count("no such number") == 1


def test_the_end_of_an_outage_is_logged_when_it_cannot_become_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    it = World()
    for _ in range(2):
        it.stream.lose()
        it.wait(1.0)
        it.stream.find()
        it.wait(1.0)
    assert "ended after" not in caplog.text
    it.wait(2.0)
    assert f"outage 1 ended after {it.now['lasted']:.1f} s" in caplog.text
    assert caplog.text.count("ended after") == 1


def test_a_clock_that_is_set_moves_all_times_alike() -> None:
    it = World()
    it.stream.lose()
    it.wait(1.0)
    before = it.now
    it.clock.jump(3600.0)
    it.wait(0.25)
    assert it.now["sign_of_life"] == before["sign_of_life"] + 3600.0
    assert it.now["lasted"] == before["lasted"] + 0.25


def test_two_faults_without_a_common_server_are_two_incidents() -> None:
    it = World()
    it.report("server", "starting", "ended")
    it.report("grpc-server", "starting", "killed")
    it.wait(1.0)
    second, first = it.truth.incidents()
    assert (first["root"], second["root"]) == ("server", "grpc-server")
    assert set(second["parts"]) == {"grpc-server", "grpc", "load"}
    assert set(first["parts"]) == {"server", "db", "postgres", "live", "load"}
    answer = it.truth.answer()
    assert answer["node"] == "server"
    assert answer["also"] == ["gRPC server has ended, and is coming back"]
    it.report("grpc-server", "active")
    it.wait(0.25)
    second, first = it.truth.incidents()
    assert second["ended"] is not None
    assert first["ended"] is None
    assert second["parts"]["load"][-1][1] is not None
    assert "load" in it.truth.answer()["waits"]


def test_a_fault_of_something_that_shares_a_server_joins_the_incident() -> None:
    it = World()
    it.stream.lose()
    it.wait(0.5)
    it.db.callers = Callers(3, 2.0)
    it.wait(0.5)
    (found,) = it.truth.incidents()
    assert found["root"] == "postgres"
    assert found["waiting"] == {
        "number": 3,
        "longest": 2.0,
        "words": "3 requests wait, the longest for 2.0 s",
    }
    assert found["parts"]["db"][-1][2] == "degraded"


def test_while_it_lasts_the_root_is_described_as_it_is_now_and_later_as_at_worst() -> None:
    it = World()
    it.report("chat", "starting", "it failed")
    it.wait(0.5)
    it.report("chat", "degraded", "1 item parked")
    it.wait(0.5)
    assert it.truth.sentence() == "chat works only in part: 1 item parked."
    it.report("chat", "active")
    it.wait(0.5)
    assert (it.now["what"], it.now["why"]) == ("chat failed", "It failed.")


def test_trouble_that_returns_at_once_is_the_same_incident_and_later_another() -> None:
    it = World()
    for pause in (1.0, 5.0):
        it.stream.lose()
        it.wait(0.5)
        it.stream.find()
        it.wait(pause)
    assert len(it.truth.incidents()) == 1
    (first,) = it.truth.incidents()
    it.stream.lose()
    it.wait(0.5)
    assert [each["id"] for each in it.truth.incidents()] == [2, 1]
    assert it.truth.totals() == ({"postgres": 1}, {"postgres": first["lasted"]}, 0.5)


def test_the_cost_of_an_incident_is_counted_from_the_last_sign_of_life() -> None:
    it = World()
    it.db.lost = 7
    it.wait(3.0)
    it.db.hears = it.stream.hears = False
    it.wait(2.5)
    it.db.lost += 1  # before it was noticed
    it.grpc.lost += 5  # of a part that is not affected
    it.wait(0.5)
    it.db.lose(silent=True)
    it.stream.lose(silent=True)
    it.wait(1.0)
    it.db.lost += 2
    it.wait(0.25)
    assert (it.now["cost"], it.now["cost_words"]) == ({"reads failed": 3}, "3 reads failed")
    it.db.find()
    it.stream.find()
    it.wait(0.25)
    it.db.lost += 100  # after it
    it.wait(1.0)
    assert it.now["cost"] == {"reads failed": 3}


def test_a_restart_is_no_incident_before_a_part_has_worked_nor_after_standing_by() -> None:
    it = World()
    it.report("chat", "waiting", "standby of another")
    it.report("chat", "starting", "it takes over")
    it.wait(1.0)
    assert it.states() == {"chat": "starting"}
    assert it.truth.incidents() == []


def test_the_answer_names_root_time_reason_waiting_cost_and_what_to_do() -> None:
    it = World()
    it.db.hears = it.stream.hears = False
    it.wait(3.0)
    it.db.lose(silent=True)
    it.wait(12.25)
    it.db.callers = Callers(6, 15.2)
    it.truth.look()
    answer = it.truth.answer()
    assert answer["what"] == "PostgreSQL does not answer."
    assert (answer["state"], answer["node"], answer["incident"]) == ("down", "server", 1)
    assert (answer["since"], answer["lasted"]) == (NOON + 2, 15.25)
    assert answer["why"].startswith("Connections stay open but nothing arrives: ")
    assert answer["waits"] == ["db", "postgres", "live", "load"]
    assert answer["keeps"] == "No change is lost."
    assert answer["cost"] == "6 requests wait, the longest for 15.2 s; none has failed yet"
    assert answer["do"] == {
        "text": "Look at the server:",
        "command": "moored explain server",
        "note": "Moored connects again by itself.",
    }
    assert it.truth.sentence().startswith("PostgreSQL does not answer: Connections stay open")
    assert it.truth.sentence().endswith(" Waiting for it: db, postgres, live, load.")
    lines = list(it.truth.outage_of("db"))
    assert lines[0].startswith("  now      db waits for PostgreSQL since ")
    assert lines[0].endswith(", for 15.2 s (outage 1)")
    assert list(it.truth.outage_of("chat")) == []


def test_if_all_works_the_answer_says_for_how_long_and_what_was_last() -> None:
    it = World()
    answer = it.truth.answer()
    assert (answer["sub"], answer["before"], answer["lasted"]) == ("8 parts, all well", "", 2.0)
    it.stream.lose(why="ended by an administrator")
    it.wait(1.25)
    it.stream.find()
    it.wait(125.25)
    answer = it.truth.answer()
    assert (answer["state"], answer["what"]) == ("works", "Everything works.")
    assert answer["lasted"] == 125.0
    assert answer["before"].startswith("The last outage was at ")
    ending = ": postgres lost its change stream to PostgreSQL, 1.5 s, nothing failed."
    assert answer["before"].endswith(ending)
    assert it.truth.sentence() == "Everything works: 8 parts."


async def test_failures_of_a_part_are_steps_of_its_incident() -> None:
    it = World()
    it.truth.start()
    it.stream.lose()
    it.wait(0.25)
    for why in ("refused", "refused again", "refused", "reset by peer"):
        it.recorder.record("db", "could not connect", kind="failure", cause=why)
        it.recorder.record("postgres", "could not connect", kind="failure", cause=why)
        it.wait(0.25)
    steps = [text for _, text in it.now["steps"]]
    assert steps[-2:] == ["postgres: refused", "postgres: refused again"]
    assert not any(text.startswith("db ") for text in steps)
    it.truth.stop()


def test_after_the_stop_nothing_is_an_incident() -> None:
    it = World()
    it.truth.stop()
    it.report("server", "starting", "it has stopped")
    it.wait(1.0)
    assert it.truth.incidents() == []
