"""A process that forks while it calls: neither the parent nor a child is harmed.

Each test is a program of its own (`fork_program.py`): a fork of this process, with its many
threads, would prove nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.servers import free_port

from moored.testing import scaled

from .servers import EchoServer

PROGRAM = Path(__file__).with_name("fork_program.py")
LIMIT = 110.0
#: What gRPC writes when a fork finds somebody inside: its child is then broken, as a rule.
BROKEN = "skipping fork() handlers"


def run(scenario: str, uri: str, forks: int) -> dict[str, Any]:
    """What the program tells of its children."""
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), scenario, "--uri", uri, "--forks", str(forks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = program.communicate(timeout=LIMIT)
    finally:
        program.kill()
        program.wait()
        for stream in (program.stdout, program.stderr):
            if stream is not None:
                stream.close()
    assert program.returncode == 0, errors
    told: dict[str, Any] = json.loads(output)
    told["stderr"] = errors
    return told


def all_well(told: dict[str, Any], children: int) -> bool:
    """Whether no child hung or crashed, and no call of the parent failed."""
    assert told["ends"] == {"ok": children}, told
    assert not told.get("errors"), told
    assert told["calls"] > 0
    return True


def test_children_of_a_process_that_calls_without_pause(echo: EchoServer) -> None:
    forks = scaled(60, least=12)
    told = run("calling", f"http://localhost:{echo.port}", forks)
    assert all_well(told, forks)
    assert told["generation"] == 1, "the parent has its connection still"
    assert BROKEN not in told["stderr"]
    assert told["longest_fork"] < 3.0, "a fork waits for short calls only"


def test_a_fork_that_waits_for_nobody_breaks_children(echo: EchoServer) -> None:
    """What is looked for above can be found: gRPC itself says that the child is broken."""
    assert BROKEN in run("careless", echo.uri, 1)["stderr"]


def test_children_that_never_call(echo: EchoServer) -> None:
    told = run("silent", echo.uri, 4)
    assert all_well(told, 4)
    assert told["generation"] == 1


@pytest.mark.soak
def test_a_fork_during_an_outage() -> None:
    forks = scaled(20, least=4)
    told = run("recovering", f"http://127.0.0.1:{free_port()}", forks)
    assert all_well(told, 2 * forks)
    assert BROKEN not in told["stderr"]
    assert told["generation"] == 2, "one connection after the outage, whoever forked meanwhile"
    assert told["later"] == 0, "calls that waited for the server have got their answers"


def test_a_fork_while_connects_and_probes_get_no_answer(echo: EchoServer) -> None:
    forks = scaled(20, least=4)
    told = run("dark", echo.uri, forks)
    assert all_well(told, forks)
    assert BROKEN not in told["stderr"]
    assert told["longest_fork"] < 3.0, "what may take long is interrupted, not waited for"


def test_a_child_follows_the_topology_by_itself(echo: EchoServer) -> None:
    told = run("moving", echo.uri, 3)
    assert all_well(told, 3)


def test_somebody_watches_the_state_of_the_connection(echo: EchoServer) -> None:
    """The thread of gRPC's that does so is inside it all the time: it makes way, and comes back."""
    forks = scaled(20, least=3)
    told = run("watching", echo.uri, forks)
    assert all_well(told, forks)
    assert BROKEN not in told["stderr"]


def test_a_fork_waits_for_all_connections_at_once(echo: EchoServer) -> None:
    told = run("watching_many", echo.uri, 3)
    assert not told["errors"]
    assert told["longest_fork"] < 0.75, "a fork is held up for 0.25 s at most"


def test_a_child_that_forks(echo: EchoServer) -> None:
    told = run("grandchildren", echo.uri, 2)
    assert all_well(told, 2)
    assert BROKEN not in told["stderr"]


@pytest.mark.soak
def test_several_threads_fork(echo: EchoServer) -> None:
    forks = scaled(10, least=3)
    told = run("several_forking", echo.uri, forks)
    assert all_well(told, 3 * forks)
    assert BROKEN not in told["stderr"]


def test_multiprocessing(echo: EchoServer) -> None:
    told = run("pooled", echo.uri, 12)
    assert all_well(told, 3)
    assert BROKEN not in told["stderr"]


def test_a_stream_that_does_not_end_is_told_to_the_child(echo: EchoServer) -> None:
    """It is refused instead of hanging; when the stream has ended, a child can call again."""
    told = run("streaming", echo.uri, 4)
    assert all_well(told, 5)
    assert told["longest_fork"] < 0.6, "a fork is not held up by streams (0.2 s at most)"


def test_without_the_preparations_of_grpc_a_child_is_refused(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    told = run("refused", echo.uri, 2)
    assert all_well(told, 2)


def test_a_manager_for_asyncio_stays_with_its_process(echo: EchoServer) -> None:
    """A child is refused while channels for asyncio are open, and has its own when they are not."""
    told = run("with_asyncio", echo.uri, 2)
    assert all_well(told, 8)
