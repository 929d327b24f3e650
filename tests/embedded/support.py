"""Helpers of the embedded server's tests: SQL in one line, and owners that can be killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psutil
import psycopg
import pytest
from tests.programs import Program

__all__ = ["LIMIT", "as_root", "family", "gone", "owner", "running", "sql", "until"]

#: Three times the longest time in which the server of a dead owner must have ended.
LIMIT = 45.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a server as another user")


def sql(url: str, query: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own."""
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        cursor = connection.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []


def until(condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Poll for an effect of another process that cannot be awaited."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.01)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run, without zombies."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these processes runs."""
    _, alive = psutil.wait_procs(processes, timeout=LIMIT)
    assert alive == []


@contextmanager
def owner(scenario: str, *arguments: str) -> Iterator[Program]:
    """Start another process, which runs a scenario of `owner_program.py`."""
    with Program("tests.embedded.owner_program", scenario, *arguments) as process:
        try:
            yield process
        finally:
            process.kill()
