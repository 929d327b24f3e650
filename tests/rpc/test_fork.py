"""Processes that fork: the parent loses nothing, and a child can call or is refused at once.

Each test runs a program of its own (`fork_program.py`): a fork of this process, with its many
threads, would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.programs import run_program

from moored.testing import scaled

from .servers import EchoServer

PROGRAM = "tests.rpc.fork_program"
LIMIT = 110.0
#: What gRPC logs when a thread is inside of it at a fork.
AT_WORK = "skipping fork() handlers"
#: gRPC 1.85 crashes in some children of a process with a thread for connectivity callbacks, also if
#: they do nothing.
CRASHED = "-11"


def run(
    scenario: str, echo: EchoServer, forks: int, children: int, *, anew: bool = False
) -> dict[str, Any]:
    """Run a scenario, check that all children succeeded, and return the program's report.

    :param anew: in a new interpreter, in which gRPC reads its variables.
    """
    arguments = (scenario, "--uri", echo.uri, "--forks", str(forks))
    if anew:
        command = [sys.executable, "-m", PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    else:
        done = run_program(PROGRAM, *arguments, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    if scenario.startswith("watch") and report["ends"].get("ok"):
        report["ends"]["ok"] += report["ends"].pop(CRASHED, 0)
    assert report["ends"] == {"ok": children}, (report, done.stderr)
    assert report.get("generation", 1) == 1, "the parent lost its connection"
    assert not report.get("errors"), report
    report["stderr"] = done.stderr
    return report


# -- gRPC is quiet at the fork ---------------------------------------------------------------------


def test_children_of_a_quiet_process_can_call(echo: EchoServer) -> None:
    forks = 2 * scaled(20)
    report = run("quiet", echo, forks, forks)
    assert AT_WORK not in report["stderr"]


def test_workers_can_call_over_a_channel_made_at_import(echo: EchoServer) -> None:
    run("lazy", echo, 3, 3)


def test_children_can_fork(echo: EchoServer) -> None:
    run("grandchildren", echo, 2, 2)


def test_several_threads_can_fork(echo: EchoServer) -> None:
    forks = scaled(10, least=2)
    run("several_forking", echo, forks, 3 * forks)


def test_multiprocessing_workers_can_call(echo: EchoServer) -> None:
    run("pooled", echo, 3, 3)


def test_child_follows_the_topology_by_itself(echo: EchoServer) -> None:
    run("moving", echo, 2, 2)


def test_inherited_connection_without_clients_is_closed_in_a_child(echo: EchoServer) -> None:
    run("unused", echo, 2, 2)


def test_locks_of_other_threads_do_not_block_a_child(echo: EchoServer) -> None:
    run("locked", echo, 1, 2)


# -- gRPC is at work at the fork -------------------------------------------------------------------


def test_children_of_a_continuously_calling_process_are_refused_at_once(echo: EchoServer) -> None:
    forks = scaled(100, least=4)
    report = run("calling", echo, forks, forks + 1)
    assert report["calls"] > 0
    quickest, longest = report["forks"]
    assert quickest < 0.1, "a fork waits"
    assert longest < 2.0, "a fork waits"


def test_children_that_never_call_do_not_harm_the_parent(echo: EchoServer) -> None:
    forks = scaled(20, least=2)
    assert run("silent", echo, forks, forks)["calls"] > 0


@pytest.mark.parametrize(
    "work", ["connecting", "probing", "closing", "making", "streaming", "dropping", "serving"]
)
def test_children_are_refused_while_grpc_is_at_work(work: str, echo: EchoServer) -> None:
    report = run(work, echo, 1, 1)
    assert report["later"] == {"ok": 2}, report


@pytest.mark.parametrize("work", ["watching", "watched"])
def test_children_are_refused_because_of_a_connectivity_callback(
    work: str, echo: EchoServer
) -> None:
    report = run(work, echo, 8, 8)
    assert report["later"] == {"ok": 2}, report


def test_child_is_refused_if_grpc_fork_support_is_disabled(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    run("disabled", echo, 2, 4, anew=True)


def test_child_is_refused_while_asyncio_channels_are_open(echo: EchoServer) -> None:
    run("with_asyncio", echo, 1, 4)


def test_calls_that_wait_for_a_connection_end_in_a_child(echo: EchoServer) -> None:
    run("waiting", echo, 2, 4)


def test_fork_during_an_outage_loses_no_call(echo: EchoServer) -> None:
    forks = scaled(20, least=2)
    report = run("recovering", echo, forks, 2 * forks)
    assert report["later"] == 0, "waiting calls got no answer"
