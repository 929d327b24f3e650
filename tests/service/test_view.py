"""The view: components, the whole state, and the tree."""

from __future__ import annotations

import json

import pytest
from tests.kernel.fake_clock import FakeClock

import moored
from moored.kernel import Chart, Clock, Machine, Recorder, StatusMonitor, Supervisor, Tree
from moored.service._health import PartHealth
from moored.service._view import RECENT, View, grafted

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("app/db", ["app/db"]),
        ("/app/db/", ["app/db"]),
        ("db", ["app/db"]),
        ("mq", ["app/mq"]),
        ("watch", ["app/db/watch", "app/mq/watch"]),
        ("db/watch", ["app/db/watch"]),
        ("b", []),
        ("nothing", []),
        ("", []),
    ],
)
def test_a_component_is_found_by_the_end_of_its_path(wanted: str, found: list[str]) -> None:
    def node(name: str, *children: Tree) -> Tree:
        return Tree(name, "running", 0.0, children=children)

    root = node("app", node("db", node("watch")), node("mq", node("watch"), node("mq")))
    health = PartHealth({"db": ("up",)})
    monitor = StatusMonitor(["up"], health.status)
    view = View(lambda: root, monitor, health, Recorder(), Clock.system())
    assert view.find(wanted) == found


async def test_the_whole_state_is_plain_data() -> None:
    recorder = Recorder()
    health = PartHealth({"lamp": ("up",)})
    monitor = StatusMonitor(["up"], health.status, recorder=recorder)
    chart = Chart(phases={"shut": (), "open": ()}, moves={"shut": "open"}, initial="shut")
    machine = Machine("door", chart)
    async with Supervisor("root", recorder=recorder) as root:
        view = View(
            root.tree,
            monitor,
            health,
            recorder,
            Clock.current(),
            {machine: "lamp"},
            address="http://x",
        )
        recorder.record("db", "lost", kind="failure", cause=ValueError("no route"), thing=object())
        state = json.loads(json.dumps(view.as_dict()))
    assert state["status"] == "starting"
    assert state["parts"] == {"lamp": "starting"}
    assert state["sentence"] == "Starting: 0 of 1 parts work: lamp: starts."
    assert state["version"] == moored.__version__
    assert state["address"] == "http://x"
    assert state["uptime"] >= 0
    assert state["conditions"]["up"]["met"] is False
    assert [each["phase"] for each in state["machines"]] == ["shut"]
    assert state["tree"]["name"] == "root"
    assert state["events"][-1]["because"] == ["no route (ValueError)"]


def test_the_sentence_names_a_required_part_before_an_optional_one() -> None:
    health = PartHealth({"extra": ("a",), "db": ("b",)}, optional=["extra"])
    monitor = StatusMonitor(["a", "b"], health.status)
    root = Tree("app", "running", 0.0)
    clock = FakeClock()
    view = View(lambda: root, monitor, health, Recorder(), clock)
    health.report("extra", "failed")
    starting = "Starting: 0 of 2 parts work: db: starts."
    assert view.sentence() == f"{starting} Also: extra has failed for good."
    health.report("db", "degraded")
    monitor.set("b", owner="nobody")
    clock.advance(20)
    assert view.sentence() == "db works only in part. Also: extra has failed for good."


def test_the_state_says_for_how_long_its_sentence_has_been_true() -> None:
    clock = FakeClock()
    health = PartHealth({"extra": (), "db": ()}, optional=["extra"])
    monitor = StatusMonitor(["up"], health.status, clock=clock)
    root = Tree("app", "running", 0.0)
    view = View(lambda: root, monitor, health, Recorder(clock=clock), clock)
    clock.advance(5)
    assert view.as_dict()["sentence_for"] == 5
    health.report("db", "failed", clock.monotonic())
    clock.advance(2)
    health.report("extra", "failed", clock.monotonic())
    clock.advance(1)
    assert view.as_dict()["sentence_for"] == 3  # it is about db
    for part in ("db", "extra"):
        health.report(part, "active", clock.monotonic())
        view.truth.look()
        clock.advance(4)
    assert view.as_dict()["sentence_for"] == 4


async def test_a_state_holds_the_newest_events_and_not_all() -> None:
    recorder = Recorder(size=RECENT * 2)
    health = PartHealth({"lamp": ("up",)})
    monitor = StatusMonitor(["up"], health.status)
    async with Supervisor("root") as root:
        view = View(root.tree, monitor, health, recorder, Clock.current())
        for number in range(RECENT * 2):
            recorder.record("db", f"event {number}")
        events = view.as_dict()["events"]
        assert len(events) == RECENT
        assert events[-1]["text"] == f"event {RECENT * 2 - 1}"
        assert view.components() == ("db", "root")
        assert len(view.explain("db")["events"]) == RECENT


def test_a_tree_is_put_in_below_the_node_with_its_path() -> None:
    leaf = Tree("manager", "running", 1.0)
    tree = Tree("moored", "running", 1.0, children=(leaf, Tree("http", "running", 1.0)))
    other = Tree("inner", "running", 1.0, children=(Tree("link", "running", 1.0),))
    whole = grafted(tree, {"moored/manager": other, "moored/nothing": other})
    assert [node.name for _, node in whole.paths()] == ["moored", "manager", "link", "http"]


def test_components_are_ordered_as_they_are_started_also_those_of_inner_trees() -> None:
    def node(name: str, *children: Tree) -> Tree:
        return Tree(name, "running", 0.0, children=children)

    class Manager:
        def statistics(self) -> dict[str, int]:
            return {}

        def explain(self) -> str:
            return ""

        def tree(self) -> Tree:
            return node("pg", node("link"))

    root = node("app", node("server"), node("postgres", node("manager")), node("live"))
    health = PartHealth({"postgres": ("up",)})
    monitor = StatusMonitor(["up"], health.status)
    systems = {"app/postgres/manager": Manager()}
    view = View(lambda: root, monitor, health, Recorder(), Clock.system(), systems=systems)
    order = view.start_order()
    assert sorted(("live", "pg/link", "app/server"), key=order.__getitem__) == [
        "app/server",
        "pg/link",
        "live",
    ]
