"""What a page of the demo gets: the map, the history, and how much is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.service.support import LIMIT, Running, running, until

#: Bytes per second that one open page may cost.
MOST = 2000
TICKS = 5


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with running("--demo") as started:
        started.wait_active()
        until(lambda: "load.reads" in started.get("/v1/map").json()["series"], "a first tick")
        yield started


def messages(service: Running) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield the name, the data and the size of each event of the stream."""
    options: dict[str, Any] = {"timeout": LIMIT, "trust_env": False, "headers": service.bearer}
    with httpx.stream("GET", f"{service.url}/v1/events", **options) as answer:
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                size = len(name.encode()) + len(line.encode()) + len("event: \n\n\n")
                yield name, json.loads(line.removeprefix("data: ")), size


def test_an_open_page_costs_at_most_two_kilobytes_per_second(demo: Running) -> None:
    stream = messages(demo)
    name, state, _ = next(stream)
    assert name == "state"
    assert state["nodes"]["chat-server"] == {"state": "unknown", "fact": "not watched"}
    sent, first, last = 0, 0.0, 0.0
    values: set[str] = set()
    ticks = 0
    for name, data, size in stream:
        if first:
            sent += size
        if name == "tick" and data.get("series"):
            first, last = first or data["t"], data["t"]
            values |= data["series"].keys()
            ticks += 1
            if ticks == TICKS:
                break
    assert sent / (last - first) <= MOST
    assert {"db.checkouts", "postgres.changes", "grpc.calls", "chat.sent"} <= values


def test_the_map_of_the_demo_leads_from_listeners_to_servers(demo: Running) -> None:
    found = demo.get("/v1/map").json()
    layers: dict[int, list[str]] = {}
    for each in sorted(found["nodes"], key=lambda each: (each["layer"], each["place"])):
        layers.setdefault(each["layer"], []).append(each["id"])
    assert layers == {
        0: ["browsers"],
        1: ["search", "live", "load"],
        2: ["postgres", "db", "grpc", "chat"],
        3: ["server", "grpc-server", "chat-server"],
    }
    flows = {(each["from"], each["to"]): each["flow"] for each in found["edges"]}
    assert flows["server", "postgres"] == "postgres.changes"
    assert flows["load", "db"] == "db.checkouts"


def test_a_part_of_the_demo_has_its_settings_and_facts(demo: Running) -> None:
    found = demo.get("/v1/parts/db").json()
    assert (found["needs"], found["serves"]) == (["server"], ["load"])
    assert next(each for each in found["settings"] if each["name"] == "max_size")["value"] == "12"
    assert "db.in_use" in found["series"]
    found = demo.get("/v1/parts/postgres").json()
    assert found["steps"][-1][1]
    assert dict(found["facts"])["Consumer search"]
    assert demo.get("/v1/history?span=120").json()["lanes"].keys() >= {"db", "server", "chat"}
