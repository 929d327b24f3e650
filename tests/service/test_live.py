"""What an open page gets: the whole state once, and then only what changes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from tests.leases.virtual import in_virtual_time

from moored.kernel import Clock, Recorder, StatusMonitor, Tree
from moored.service import Part
from moored.service._browser_streams import BrowserStream, BrowserStreams
from moored.service._health import PartHealth
from moored.service._history import STEP
from moored.service._live import ANSWERS, LOOKS, SETTLE, Live
from moored.service._view import View
from moored.testing import Sim

pytestmark = pytest.mark.pure


class Judgement(NamedTuple):
    state: str = "works"
    fact: str = ""


class FakeTruth:
    """Judges as a test says, and counts how often it is asked."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = dict.fromkeys(nodes, Judgement())
        self.outages: list[dict[str, Any]] = []
        self.said = "Everything works."
        self.asked: Counter[str] = Counter()

    def judged(self) -> Mapping[str, Judgement]:
        self.asked["judged"] += 1
        return self.nodes

    def answer(self) -> Mapping[str, Any]:
        self.asked["answer"] += 1
        return {"what": self.said, "lasted": float(self.asked["answer"])}

    def incidents(self) -> list[dict[str, Any]]:
        return self.outages

    def affected(self) -> Mapping[str, int]:
        return {node: 7 for node, found in self.nodes.items() if found.state == "down"}

    def wall_of(self, at: float) -> float:
        clock = Clock.current()
        return at + clock.wall() - clock.monotonic()


class Work:
    """A system with counters."""

    def __init__(self) -> None:
        self.counters = {"done": 0, "idle": 0}

    def statistics(self) -> Mapping[str, Any]:
        return {"counters": self.counters}

    def explain(self) -> str:
        return ""

    def tree(self) -> Tree:
        return Tree("", "running", 0.0)


class Page:
    """A live service with these parts, and its open page."""

    def __init__(self, *parts: Part, size: int = 256) -> None:
        names = [each.name for each in parts]
        health = PartHealth(dict.fromkeys(names, ()))
        monitor = StatusMonitor(["up"], health.status)
        clock = Clock.current()
        self.systems = {f"app/{name}/run": Work() for name in names}
        root = Tree("app", "running", 0.0)
        view = View(
            lambda: root, monitor, health, Recorder(clock=clock), clock, systems=self.systems
        )
        self.truth = FakeTruth(*names)
        self.live = Live(view, parts, self.truth, BrowserStreams(size=size), "app")
        self.live.start()

    def open(self) -> BrowserStream:
        client = self.live.join(events=False)
        assert client is not None
        return client

    async def __aenter__(self) -> Page:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.live.close()


def taken(client: BrowserStream) -> list[tuple[str, Any]]:
    """Return the messages that a page gets now: names and data."""
    found = []
    for message in client.take():
        name, data = message.decode().strip().split("\n", 1)
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def part(name: str, *ties: str, **more: Any) -> Part:
    return Part(name, lambda wiring: (), ties=ties, **more)


@in_virtual_time
async def test_a_stream_begins_with_the_state_and_then_has_what_changes(sim: Sim) -> None:
    async with Page(part("load", "db:5432")) as page:
        await asyncio.sleep(3 * STEP + 0.5)
        client = page.open()
        ((name, state),) = taken(client)
        assert name == "state"
        assert set(state["nodes"]) == {"load", "db:5432"}
        assert state["nodes"]["db:5432"] == {"state": "unknown", "fact": "not watched"}
        assert state["series"] == {"load.done": 0.0, "load.idle": 0.0}
        assert [each["id"] for each in state["map"]["nodes"]] == ["load", "db:5432"]
        page.systems["app/load/run"].counters["done"] += 3
        await asyncio.sleep(STEP)
        ((name, tick),) = taken(client)
        assert (name, tick["series"], tick["nodes"]) == ("tick", {"load.done": 1.5}, {})
        await asyncio.sleep(STEP)
        assert dict(taken(client))["tick"]["series"] == {"load.done": 0.0}
        await asyncio.sleep(STEP)
        assert dict(taken(client))["tick"]["series"] == {}
        del page.systems["app/load/run"]
        await asyncio.sleep(STEP)
        assert dict(taken(client))["tick"]["series"] == {"load.done": None, "load.idle": None}


@in_virtual_time
async def test_a_change_of_state_is_sent_soon_and_is_in_the_history(sim: Sim) -> None:
    async with Page(part("db")) as page:
        await asyncio.sleep(STEP + 0.5 + LOOKS)
        client = page.open()
        client.take()
        page.truth.nodes["db"] = Judgement("down", "does not answer")
        page.truth.said = "db does not answer."
        page.truth.outages = [{"id": 7, "root": "db", "lasted": 0.1}]
        page.live.changed()
        await asyncio.sleep(SETTLE + 0.01)
        found = dict(taken(client))
        assert found["answer"]["what"] == "db does not answer."
        assert found["tick"]["nodes"] == {"db": {"state": "down", "fact": "does not answer"}}
        assert found["outage"]["id"] == 7
        lane = page.live.history_of(120)["lanes"]["db"]
        assert [rest for _, *rest in lane] == [["works", None], ["down", 7]]
        page.truth.outages = [{"id": 7, "root": "db", "lasted": 2.1}]
        await asyncio.sleep(STEP)
        assert dict(taken(client)).keys() == {"tick"}  # the lengths alone are no change
        await asyncio.sleep(ANSWERS)
        assert dict(taken(client)).keys() == {"tick", "answer"}  # but they are not left too old


@in_virtual_time
async def test_many_changes_are_looked_at_twice_a_second(sim: Sim) -> None:
    async with Page(part("db")) as page:
        page.open()
        before = page.truth.asked["judged"]
        for _ in range(200):
            page.live.changed()
            await asyncio.sleep(0.05)
        assert page.truth.asked["judged"] - before <= 10 / LOOKS + 10 / STEP + 1


@in_virtual_time
async def test_nothing_is_sent_while_no_page_is_open(sim: Sim) -> None:
    async with Page(part("db")) as page:
        await asyncio.sleep(50 * STEP)
        assert page.truth.asked["answer"] == 0
        assert page.truth.asked["judged"] <= 51


@in_virtual_time
async def test_a_page_that_is_opened_late_has_all_numbers_so_far(sim: Sim) -> None:
    async with Page(part("load")) as page:
        await asyncio.sleep(600)
        found = page.live.history_of(900)
        assert found["now"] - found["from"] == pytest.approx(600, abs=STEP)
        assert set(found["series"]) == {"load.done", "load.idle"}


@in_virtual_time
async def test_a_slow_page_gets_the_whole_state_again(sim: Sim) -> None:
    async with Page(part("db"), size=3) as page:
        client = page.open()
        await asyncio.sleep(10 * STEP)
        # A change that is lost is in the state: no event is.
        assert taken(client)[0][0] == "state"
        await asyncio.sleep(STEP)
        assert "state" not in dict(taken(client))


@in_virtual_time
async def test_a_change_before_the_first_state_is_sent_is_not_undone_by_it(sim: Sim) -> None:
    async with Page(part("db")) as page:
        client = page.open()
        page.truth.nodes["db"] = Judgement("down", "does not answer")
        page.live.changed()
        await asyncio.sleep(STEP)
        shown: dict[str, Any] = {}
        for name, data in taken(client):
            if name in ("state", "tick"):
                shown |= data["nodes"]
        assert shown["db"]["state"] == "down"


@in_virtual_time
async def test_a_page_that_loses_a_change_to_an_event_gets_the_whole_state(sim: Sim) -> None:
    async with Page(part("db"), size=3) as page:
        client = page.live.join(events=True)
        assert client is not None
        taken(client)
        await asyncio.sleep(STEP)
        recorder = Recorder(clock=Clock.current())
        for _ in range(4):
            page.live.sink(recorder.record("db", "opened"))
        await asyncio.sleep(0.01)
        assert any(each.startswith(b"event: state") for each in client.take())


@in_virtual_time
async def test_five_hundred_parts_cost_a_page_little(sim: Sim) -> None:
    """Of the members of a stack, a page gets changes of state alone."""
    parts = [part("pg", kind="stream"), *(part(f"c{n}", "pg", kind="consumer") for n in range(500))]
    async with Page(*parts) as page:
        client = page.open()
        ((_, state),) = taken(client)
        assert [each["name"] for each in state["map"]["nodes"]] == ["pg", "500 consumers"]
        assert state["series"] == {}
        assert state["nodes"]["+c0"] == {"state": "works", "fact": "500 working"}
        for number in range(3):
            for name in page.truth.nodes:
                page.truth.nodes[name] = Judgement("works", f"{number} handled")
            await asyncio.sleep(STEP)
        assert sum(map(len, client.take())) < 3 * STEP * 200
        page.truth.nodes["c77"] = Judgement("degraded", "4 min behind")
        await asyncio.sleep(STEP)
        found = dict(taken(client))
        assert [each["name"] for each in found["map"]["nodes"]] == ["pg", "499 consumers", "c77"]
        assert found["tick"]["nodes"] == {
            "+c0": {"state": "works", "fact": "499 working"},
            "c77": {"state": "degraded", "fact": "4 min behind"},
        }


@in_virtual_time
async def test_browsers_are_as_many_as_the_brokers_have_streams(sim: Sim) -> None:
    async with Page(part("live", kind="broker")) as page:
        assert page.live.judged("browsers")["fact"] == "none connected"
        page.live.sampler.last = {"live.streams": 2.0}
        assert page.live.judged("browsers") == {"state": "works", "fact": "2 connected"}
