"""The outages of the real demo: root, waiting parts and bystanders, and one length everywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.frozen import frozen
from tests.service.support import LIMIT, Running, gone, running, until

from moored.cli import main

pytestmark = pytest.mark.timeout(400)

PARTS = {"server", "db", "postgres", "live", "grpc-server", "grpc", "chat", "search", "load"}
ALL_OF_SERVER = {"db", "postgres", "live", "search", "load"}
#: The root of each fault, its state, and the parts that wait for it; None if nothing is down.
FAULTS: dict[str, tuple[str, str, set[str]] | None] = {
    "kill-backends": ("postgres", "down", {"live", "search"}),
    "restart-postgres": ("server", "down", ALL_OF_SERVER),
    "black-hole": ("postgres", "down", {"live", "search"}),
    "expire-pool": None,
    "kill-grpc": ("grpc-server", "down", {"grpc", "load"}),
    "cut-sessions": ("chat", "degraded", set()),
    "take-over": None,
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running demo."""
    scratch = tmp_path_factory.mktemp("demo")
    with running("--demo", environ={"TMPDIR": str(scratch)}) as started:
        started.wait_active()
        until(lambda: works(started), "all parts work")
        family = started.family()
        yield started
        assert started.stop() == 0, started.lines
    gone(family)


def works(demo: Running) -> bool:
    state = demo.get("/v1/status").json()
    good = {each["state"] for node, each in state["nodes"].items() if node in PARTS} == {"works"}
    return good and bool(state["answer"]["state"] == "works")


def outages(demo: Running) -> list[Json]:
    found: list[Json] = demo.get("/v1/outages").json()["outages"]
    return found


def noticed(demo: Running, known: int, number: int = 1) -> None:
    """Wait until there are so many outages since that with the number `known`."""
    until(lambda: len(new(demo, known)) >= number, "the outage is noticed")


def new(demo: Running, known: int) -> list[Json]:
    return [each for each in reversed(outages(demo)) if each["id"] > known]


def newest(demo: Running) -> int:
    """Return the number of the newest outage, when all works and has settled."""
    until(lambda: works(demo), "all parts work")
    time.sleep(2.5)  # trouble that returns sooner belongs to the same outage
    return max((each["id"] for each in outages(demo)), default=0)


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) in (0, 3)
    return capsys.readouterr().out


def check_lengths(demo: Running, capsys: pytest.CaptureFixture[str], outage: Json) -> None:
    """Every place tells the same length of an outage that is over."""
    lasted = outage["lasted"]
    words = f"{lasted:.1f} s"
    assert lasted == pytest.approx(outage["ended"] - outage["sign_of_life"], abs=0.001)
    state = demo.get("/v1/status").json()
    (same,) = [each for each in state["outages"] if each["id"] == outage["id"]]
    assert same["lasted"] == pytest.approx(lasted, abs=0.05)
    assert f"{outage['what']}, for {words}, until " in text_of(capsys, "top", "--url", demo.url)
    for part in outage["parts"]:
        text = text_of(capsys, "explain", part, "--url", demo.url)
        assert f" for {words}, from " in text, text
        assert f"(outage {outage['id']})" in text
    if outage["fault"] is not None:
        (recovery, *_) = state["faults"]["recoveries"]
        assert recovery["outage"] == outage["id"]
        assert recovery["healthy_after"] == pytest.approx(lasted, abs=0.05)


def check_parts(outage: Json, root: str, state: str, waits: set[str]) -> None:
    """The outage has this root, these parts that wait, and no bystander."""
    assert outage["root"] == root, outage
    assert outage["state"] == state, outage
    assert set(outage["parts"]) == {root, *waits}, outage


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_root_and_those_that_wait_and_one_length(
    demo: Running, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    known, expected = newest(demo), FAULTS[fault]
    answer = httpx.post(f"{demo.url}/v1/break/{fault}", headers=demo.bearer, timeout=LIMIT)
    assert answer.status_code == 202, answer.text
    until(lambda: demo.get("/v1/status").json()["faults"]["running"] is None, "it is over")
    state = demo.get("/v1/status").json()
    (recovery, *_) = state["faults"]["recoveries"]
    assert recovery["failed"] == ""
    if fault == "expire-pool" and (waited := new(demo, known)):
        # On a busy machine, callers have waited for the new connections.
        assert {each["root"] for each in waited} == {"db"}
        return
    if expected is None:
        assert new(demo, known) == []
        assert recovery["outage"] is None
        assert "No outage" in state["faults"]["lines"][-1]
        return
    (outage,) = new(demo, known)
    check_parts(outage, *expected)
    assert outage["fault"] == fault
    assert outage["sign_of_life"] <= outage["noticed"] <= outage["ended"]
    check_lengths(demo, capsys, outage)


def test_a_frozen_postgres_is_named_within_seconds_with_all_five_answers(
    demo: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    known = newest(demo)
    with frozen(demo.postgres()):
        began = time.time()
        noticed(demo, known)
        until(lambda: outages(demo)[0]["root"] == "server", "the root is found")
        assert time.time() - began < 15.0  # at most 5 s on a machine of its own
        until(lambda: bool(outages(demo)[0]["waiting"]), "callers wait")
        answer = demo.get("/v1/status").json()["answer"]
        assert answer["what"] == "PostgreSQL does not answer."
        assert (answer["state"], answer["node"]) == ("down", "server")
        assert set(answer["waits"]) == ALL_OF_SERVER
        assert answer["keeps"] == "No change is lost."
        assert re.match(r"\d+ requests? waits?, ", answer["waiting"])
        assert answer["do"]["command"] == "moored explain server"
        nodes = demo.get("/v1/status").json()["nodes"]
        assert nodes["db"] == {"state": "waits", "fact": "waits for PostgreSQL"}
        assert nodes["server"] == {"state": "down", "fact": "does not answer"}
        assert nodes["grpc"]["state"] == nodes["chat"]["state"] == "works"
        status = text_of(capsys, "status", "--url", demo.url)
        for label in ("since", "why", "waits", "cost", "do"):
            assert re.search(rf"^  {label} +\S", status, re.MULTILINE), status
        assert re.search(r"^  do +Look at the server: moored explain server", status, re.MULTILINE)
        assert outages(demo)[0]["sign_of_life"] - began < 1.0
    newest(demo)
    (outage,) = new(demo, known)
    check_parts(outage, "server", "down", ALL_OF_SERVER)
    assert outage["what"] == "PostgreSQL did not answer"
    check_lengths(demo, capsys, outage)


def test_two_faults_at_once_are_two_outages_with_their_own_roots(
    demo: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    known = newest(demo)
    state = demo.get("/v1/status").json()
    os.kill(state["grpc-server"]["pid"], signal.SIGKILL)
    os.kill(state["server"]["pid"], signal.SIGINT)
    noticed(demo, known, 2)
    newest(demo)
    found = {each["root"]: each for each in new(demo, known)}
    assert set(found) == {"server", "grpc-server"}, json.dumps(found)
    check_parts(found["server"], "server", "down", ALL_OF_SERVER)
    check_parts(found["grpc-server"], "grpc-server", "down", {"grpc", "load"})
    for outage in found.values():
        lasted = f"{outage['lasted']:.1f} s"
        assert f"{outage['what']}, for {lasted}, until " in text_of(
            capsys, "top", "--url", demo.url
        )
        text = text_of(capsys, "explain", outage["root"], "--url", demo.url)
        assert f" for {lasted}, from " in text, text
