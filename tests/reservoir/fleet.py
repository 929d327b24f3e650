"""Many processes with pools to one server, and an observer that counts their connections."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
from tests.programs import Program

__all__ = ["Census", "Fleet"]


class Census:
    """Counts the server's connections of some applications, again and again, in a thread.

    A backend leaves the server's list a moment after its client has hung up, and its successor may
    be on the list by then. So what counts are those that an earlier count has seen; on a busy
    machine, one that is `settled` seconds earlier.
    """

    def __init__(self, url: str, application: str, *, settled: float = 0.0) -> None:
        self._url = url
        self._application = application
        self._settled = settled
        self._over = threading.Event()
        #: How often was counted; who is there now, and for which application; who ever was there.
        self.counts = 0
        self.present: dict[int, str] = {}
        self.seen: set[int] = set()
        #: How many there were at most.
        self.most = 0
        self._since: dict[int, float] = {}

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Count until the end of the block."""
        thread = threading.Thread(target=self._count_on, name="census")
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
        assert self.counts > 1, "nothing was counted"

    def of(self, application: str) -> int:
        """How many connections one application has now."""
        return list(self.present.values()).count(application)

    def _count_on(self) -> None:
        query = """select pid, application_name from pg_stat_activity
                   where application_name like %s and datname is not null"""
        with psycopg.connect(self._url, autocommit=True) as conn:
            while not self._over.wait(max(0.02, self._settled / 10)):
                self._note(dict(conn.execute(query, [f"{self._application}%"])))

    def _note(self, found: dict[int, str]) -> None:
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in found}
        self.most = max(
            self.most, sum(since < now - self._settled for since in self._since.values())
        )
        self.present = found
        self.seen |= found.keys()
        self.counts += 1


class Fleet:
    """Processes that each use a pool, with different application names."""

    def __init__(self, orders: dict[str, dict[str, Any]]) -> None:
        self._orders = orders
        self._process: Program | None = None
        self._pids: dict[str, int] = {}

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL; its number is not used again."""
        os.kill(self._pids[name], signal.SIGKILL)

    def __enter__(self) -> Self:
        orders = json.dumps(list(self._orders.values()))
        self._process = Program(str(Path(__file__).with_name("service.py")), orders)
        pids = json.loads(self._process.stdout.readline())
        self._pids = dict(zip(self._orders, pids, strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with self._process as program:
            program.stdin.close()
            program.stdout.read()
