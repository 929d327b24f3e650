"""`moored soak`: three lines of load on a real server, and their report."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url
from tests.programs import Program
from tests.service.support import LIMIT, clean_environment, moored, until

from moored.embedded import SyncEmbeddedPostgres

Report = Callable[..., dict[str, Any]]

SMALL = ("--max-size", "4", "--callers", "8")


@pytest.fixture
def report(postgres_url: str) -> Report:
    """Run it for a short time; returns the parsed output by the names of the lines."""

    def run(*options: str, **environ: Any) -> dict[str, Any]:
        arguments = ("soak", "--url", postgres_url, *SMALL, "--json", *options)
        ended = moored(*arguments, **environ)
        assert (ended.returncode, ended.stderr) == (0, "")
        return {line["line"]: line for line in json.loads(ended.stdout)}

    return run


def pids(url: str) -> list[int]:
    """Return the backends of the pool."""
    with psycopg.connect(url) as conn:
        found = conn.execute(
            "select pid from pg_stat_activity where application_name like 'moored soak%' "
            "and datname = current_database()"
        )
        return [pid for (pid,) in found]


def test_each_line_shows_what_it_is_for(report: Report) -> None:
    found = report("--minutes", "0.1")
    assert list(found) == ["steady", "burst", "expiry"]
    steady, burst, expiry = found.values()
    assert not any(line["errors"] for line in found.values())
    # Two callers of four connections find a ready one, and eight do not.
    assert steady["ready_min"] >= 2
    assert steady["empty"] == steady["connects"] == 0
    assert burst["empty"] > 0
    assert burst["ready_median"] == 0
    assert burst["wait_p50_ms"] > steady["wait_p50_ms"]
    # All connections were replaced, and no caller failed.
    assert expiry["connects"] >= 4
    for line in found.values():
        assert line["checkouts_per_second"] > 0
        assert sum(line["each_second"]["connects"]) == line["connects"]


def test_the_settings_of_the_pool_come_from_the_environment(report: Report) -> None:
    lives = {"BASE_LIFETIME": "60s", "LIFETIME_JITTER": "0s", "ENABLED": "false"}
    settings = {f"MOORED_RESERVOIR_{name}": value for name, value in lives.items()}
    steady = report("--minutes", "0.02", **settings)["steady"]
    assert steady["longest_lifetime"] == 60
    assert 1 <= steady["connects"] <= 2  # on demand


def test_kills_end_connections_of_the_pool_alone(report: Report, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, application_name="moored soak") as other:
        found = report("--minutes", "0.1", "--kill")
        other.execute("select 1")
    assert found["expiry"]["kills"] == []
    for name in ("steady", "burst"):
        first = found[name]["kills"][0]
        assert first["backends"] == 1
        assert first["errors"] <= 1
        assert first["full_after"] is not None
        assert found[name]["connects"] >= 1


def test_the_report_is_a_table_and_a_plot(postgres_url: str) -> None:
    ended = moored("soak", "--url", postgres_url, *SMALL, "--minutes", "0.05", "--kill")
    assert (ended.returncode, ended.stderr) == (0, "")
    for word in ("ready min", "empty", "wait p50 ms", "errors", "steady", "burst", "expiry", "█"):
        assert word in ended.stdout
    kills = r"\d kills? of \d backends? together: \d errors?, at most \d of one kill; full again"
    assert re.search(kills, ended.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_report_so_far(number: signal.Signals, postgres_url: str) -> None:
    arguments = ("soak", "--url", postgres_url, *SMALL, "--minutes", "30")
    with Program("moored.cli", *arguments, environ=clean_environment()) as program:
        until(lambda: len(pids(postgres_url)) == 4, "a full pool")
        program.send_signal(number)
        assert program.wait(LIMIT) == 128 + number
        said = program.stdout.read()
    assert "steady" in said
    assert "burst" not in said
    until(lambda: not pids(postgres_url), "the end of its connections")


def test_in_a_terminal_its_progress_is_shown(postgres_url: str) -> None:
    ours, theirs = os.openpty()
    arguments = ("soak", "--url", postgres_url, *SMALL, "--minutes", "30")
    environ, terminal = clean_environment(TERM="xterm"), Path(os.ttyname(theirs))
    with Program("moored.cli", *arguments, environ=environ, log=terminal) as program:
        seen = b""
        while b"checkouts/s" not in seen:
            seen += os.read(ours, 1000)
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT) == 130
    os.close(ours)
    os.close(theirs)


def test_a_server_that_is_killed_is_in_the_report(tmp_path: Path) -> None:
    with SyncEmbeddedPostgres(tmp_path / "postgres") as server:
        arguments = ("soak", "--url", server.url, *SMALL, "--minutes", "0.06")
        with Program("moored.cli", *arguments, environ=clean_environment()) as program:
            until(lambda: len(pids(server.url)) == 4, "a full pool")
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            assert program.wait(LIMIT) == 1
            said = program.stdout.read()
    assert "expiry" in said
    assert "OperationalError: " in said
    assert "still waiting at the end" in said


def refusal(*arguments: str, **environ: Any) -> str:
    """Return the one line of stderr of a command that is refused."""
    ended = moored("soak", *arguments, **environ)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_wrong_password_is_refused(postgres_url: str) -> None:
    url = make_url(postgres_url).set(password="wrong").render_as_string(hide_password=False)
    assert "password authentication failed" in refusal("--url", url)


def test_more_connections_than_the_server_has_left_are_refused(postgres_url: str) -> None:
    said = refusal("--url", postgres_url, "--max-size", "2000", "--callers", "3000")
    assert "connections left, and --max-size is 2000: lower it, or raise max_connections" in said


def test_the_connection_limit_of_the_role_counts(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create role soaker login password 'few' connection limit 4")
        try:
            url = make_url(postgres_url).set(username="soaker", password="few")
            said = refusal("--url", url.render_as_string(hide_password=False), *SMALL)
        finally:
            conn.execute("drop role soaker")
    assert "the server has 3 connections left, and --max-size is 4" in said


def test_mistakes_in_options_and_variables_are_refused(postgres_url: str) -> None:
    said = refusal("--url", postgres_url, "--max-size", "9", "--callers", "9")
    assert "--callers 9 must be more than --max-size 9" in said
    said = refusal("--url", postgres_url, MOORED_RESERVOIR_RATE="fast")
    assert "MOORED_RESERVOIR_RATE: 'fast' is not a number per second" in said
