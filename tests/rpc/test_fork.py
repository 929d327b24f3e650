"""A process that forks while it calls: both the parent and the children continue to work.

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
from tests.servers import free_port

from moored.testing import scaled

from .servers import EchoServer

PROGRAM = "tests.rpc.fork_program"
LIMIT = 110.0
#: What gRPC logs when a thread is inside of it at a fork: the child is then usually broken.
BROKEN = "skipping fork() handlers"


def run(scenario: str, uri: str, forks: int, *, anew: bool = False) -> dict[str, Any]:
    """Run a scenario, and return the program's report.

    :param anew: in a new interpreter, in which gRPC reads its variables.
    """
    arguments = (scenario, "--uri", uri, "--forks", str(forks))
    if anew:
        command = [sys.executable, "-m", PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    else:
        done = run_program(PROGRAM, *arguments, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    report["stderr"] = done.stderr
    return report


def all_well(report: dict[str, Any], children: int) -> bool:
    """Check that no child hung or crashed, and no call of the parent failed."""
    assert report["ends"] == {"ok": children}, report
    assert not report.get("errors"), report
    assert report["calls"] > 0
    return True


def test_children_of_a_continuously_calling_process_can_call(echo: EchoServer) -> None:
    forks = scaled(60, least=2)
    report = run("calling", f"http://localhost:{echo.port}", forks)
    assert all_well(report, forks)
    assert report["generation"] == 1, "the parent lost its connection"
    assert BROKEN not in report["stderr"]
    assert report["longest_fork"] < 3.0, "a fork waited too long"


def test_fork_that_waits_for_no_call_breaks_children(echo: EchoServer) -> None:
    """Check that the log line searched for above appears when a child is broken."""
    assert BROKEN in run("careless", echo.uri, 1)["stderr"]


def test_children_that_never_call_do_not_harm_the_parent(echo: EchoServer) -> None:
    forks = scaled(10, least=2)
    report = run("silent", echo.uri, forks)
    assert all_well(report, forks)
    assert report["generation"] == 1


@pytest.mark.soak
def test_fork_during_an_outage_works() -> None:
    forks = scaled(20, least=4)
    report = run("recovering", f"http://127.0.0.1:{free_port()}", forks)
    assert all_well(report, 2 * forks)
    assert BROKEN not in report["stderr"]
    assert report["generation"] == 2, "more than one connection after the outage"
    assert report["later"] == 0, "waiting calls got no answer"


def test_fork_during_hung_connects_and_probes_is_not_delayed(echo: EchoServer) -> None:
    forks = scaled(20, least=2)
    report = run("dark", echo.uri, forks)
    assert all_well(report, forks)
    assert BROKEN not in report["stderr"]
    assert report["longest_fork"] < 3.0, "the fork waited for a hung connect"


def test_child_follows_the_topology_by_itself(echo: EchoServer) -> None:
    report = run("moving", echo.uri, 2)
    assert all_well(report, 2)


def test_fork_with_a_connectivity_watcher_works(echo: EchoServer) -> None:
    """gRPC's watcher thread is always inside of gRPC: it leaves for the fork, and returns."""
    forks = scaled(20, least=2)
    report = run("watching", echo.uri, forks)
    assert all_well(report, forks)
    assert BROKEN not in report["stderr"]


def test_fork_waits_for_all_connections_concurrently(echo: EchoServer) -> None:
    report = run("watching_many", echo.uri, 2)
    assert not report["errors"]
    assert report["quickest_fork"] < 0.75, "a fork may be delayed by 0.25 s at most"


def test_child_can_fork(echo: EchoServer) -> None:
    forks = scaled(5)
    report = run("grandchildren", echo.uri, forks)
    assert all_well(report, forks)
    assert BROKEN not in report["stderr"]


@pytest.mark.soak
def test_several_threads_can_fork(echo: EchoServer) -> None:
    forks = scaled(10, least=3)
    report = run("several_forking", echo.uri, forks)
    assert all_well(report, 3 * forks)
    assert BROKEN not in report["stderr"]


def test_multiprocessing_workers_can_call(echo: EchoServer) -> None:
    report = run("pooled", echo.uri, 12)
    assert all_well(report, 3)
    assert BROKEN not in report["stderr"]


def test_endless_stream_makes_the_child_refuse_instead_of_hang(echo: EchoServer) -> None:
    """The child's calls are refused; after the stream has ended, a child can call again."""
    forks = scaled(10, least=2)
    report = run("streaming", echo.uri, forks)
    assert all_well(report, forks + 1)
    assert report["quickest_fork"] < 0.6, "a stream delays the fork by more than 0.2 s"


def test_child_is_refused_if_grpc_fork_support_is_disabled(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    report = run("refused", echo.uri, 2, anew=True)
    assert all_well(report, 2)


def test_asyncio_manager_is_refused_in_a_child_while_its_channels_are_open(
    echo: EchoServer,
) -> None:
    """After the channels are closed, a child can make its own."""
    forks = scaled(5)
    report = run("with_asyncio", echo.uri, forks)
    assert all_well(report, 4 * forks)


def test_futures_that_wait_for_a_connection_end_in_a_child(echo: EchoServer) -> None:
    report = run("waiting", f"http://localhost:{echo.port}", 2)
    assert all_well(report, 2)


def test_inherited_connection_without_clients_is_closed_in_a_child(echo: EchoServer) -> None:
    report = run("unused", f"http://localhost:{echo.port}", 2)
    assert all_well(report, 2)
    assert report["generation"] == 1
