"""How soon does the first call succeed after Milvus is back, and how many connects does it take?

A real Milvus (Milvus Lite, in its own process) is killed with SIGKILL and restarted. Callers of
both sides, ours and PyMilvus's, run through the same outage. Ours call once during the outage,
with a timeout of 30 s; those of PyMilvus, whose calls fail at once, call every 50 ms until a call
succeeds. The time starts when the port is open. Connects are successful ones: for ours,
connections that reached the server through a proxy; for PyMilvus, its own count of reconnects
(which may share a socket).

Each call writes a row; all rows are looked up afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# The tests and tools are not installed: import them from the checkout.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rpc.handlers import eventually
from tests.rpc.milvus_server import MilvusServer

from _harness import Figure, Report, main, spread
from _rpc_recovery_sides import (
    Outage,
    Side,
    SideResult,
    in_coroutines,
    in_threads,
    prepare,
    written,
)
from moored.rpc.milvus import MilvusClient, MilvusManager
from moored.testing import FaultProxy

CALLERS = 20
QUICK = (2.0, 2.0, 6.0)
FULL = (2.0,) * 5 + (6.0,) * 5 + (20.0,) * 3


class MilvusUnderTest:
    """The server, with a client that creates collections and counts rows."""

    def __init__(self, server: MilvusServer, admin: MilvusClient, start_takes: float) -> None:
        self.server = server
        self._admin = admin
        self._start_takes = start_takes
        self._numbers = itertools.count(1)
        #: When the port was last opened, and the seconds of each outage.
        self.opened_at = 0.0
        self.outages: list[float] = []

    @property
    def uri(self) -> str:
        return self.server.uri

    def collections(self, number: int) -> tuple[list[str], list[str]]:
        """Create a collection for each caller of both sides."""
        prefix = f"round_{next(self._numbers)}"
        return (
            prepare(self._admin, f"{prefix}_ours", number),
            prepare(self._admin, f"{prefix}_theirs", number),
        )

    def outage(self, seconds: float) -> Outage:
        """Return an outage in which the port is closed for so many seconds."""

        def happen(begun: Callable[[], object]) -> None:
            self.server.kill()
            killed = time.perf_counter()
            begun()
            time.sleep(max(0.0, seconds - self._start_takes))
            started = time.perf_counter()
            self.server.start()
            eventually(self.server.listens, 60.0)
            self.opened_at = time.perf_counter()
            self._start_takes = self.opened_at - started
            self.outages.append(self.opened_at - killed)

        return happen

    def check(self, names: list[str], lost: int) -> None:
        """Check that the row of every successful call exists."""
        if (found := written(self._admin, names)) < len(names) - lost:
            raise AssertionError(
                f"{found} of {len(names)} rows exist, but only {lost} calls failed"
            )


@contextmanager
def milvus_under_test() -> Iterator[MilvusUnderTest]:
    with tempfile.TemporaryDirectory() as folder, MilvusManager() as manager:
        begun = time.perf_counter()
        with MilvusServer(Path(folder) / "data") as server:
            takes = time.perf_counter() - begun
            yield MilvusUnderTest(server, MilvusClient(server.uri, manager=manager), takes)


def first_call(milvus: MilvusUnderTest, seconds: float) -> tuple[float, float, int]:
    """Run one caller on each side; return the milliseconds of both, and our failed calls."""
    names, their_names = milvus.collections(1)
    ours, theirs = in_threads(
        Side(milvus.uri, names), Side(milvus.uri, their_names), milvus.outage(seconds)
    )
    milvus.check(names, ours.failed)
    milvus.check(their_names, 0)
    took = [(each.first - milvus.opened_at) * 1000 for each in (ours, theirs)]
    return took[0], took[1], ours.failed


def many(milvus: MilvusUnderTest, threads: bool) -> tuple[int, SideResult, SideResult]:
    """Run many callers on each side; return our connects, and the results of both."""
    names, their_names = milvus.collections(CALLERS)
    with FaultProxy("127.0.0.1", milvus.server.port).in_thread() as proxy:
        sides = (Side(f"http://127.0.0.1:{proxy.port}", names), Side(milvus.uri, their_names))
        outage = milvus.outage(2.0)
        if threads:
            ours, theirs = in_threads(*sides, outage)
        else:
            ours, theirs = asyncio.run(in_coroutines(*sides, outage))
        counts = proxy.statistics()
    # Without the connect before the outage.
    connects = counts.accepted - counts.refused - 1
    if ours.connects != connects:
        raise AssertionError(f"{connects} connects, but {ours.connects} new generations")
    milvus.check(names, ours.failed)
    milvus.check(their_names, 0)
    return connects, ours, theirs


def maximum(values: list[int]) -> Figure:
    return Figure(max(values), "", min(values), max(values))


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.ERROR)  # the errors of the outages are expected
    with milvus_under_test() as milvus:
        alone = [first_call(milvus, seconds) for seconds in (QUICK if quick else FULL)]
        report.add("first_call_ms_p50", spread([ours for ours, _, _ in alone], "ms"))
        report.add("pymilvus_first_call_ms_p50", spread([theirs for _, theirs, _ in alone], "ms"))
        lost = sum(failed for *_, failed in alone)
        for what in ("threads", "coroutines"):
            rounds = [many(milvus, what == "threads") for _ in range(1 if quick else 3)]
            report.add(f"connects_per_outage_{what}", maximum([ours for ours, _, _ in rounds]))
            report.add(
                f"pymilvus_connects_per_outage_{what}",
                maximum([theirs.connects for _, _, theirs in rounds]),
            )
            lost += sum(ours.failed for _, ours, _ in rounds)
        report.add("calls_lost", Figure(lost))
        shown = ", ".join(f"{seconds:.1f}" for seconds in milvus.outages)
    report.notes.append(f"the port was closed for {shown} s; every row was looked up")
    report.notes.append(f"{CALLERS} callers on each side for the connects")


if __name__ == "__main__":
    main("rpc_recovery", (__doc__ or "").splitlines()[0], measure)
