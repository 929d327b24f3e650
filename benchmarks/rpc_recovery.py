"""How long is it, after Milvus is back, until the first call is answered, and who reconnects?

A real Milvus (Milvus Lite, in its own process) is killed with -9 and started again. Callers of both
sides, ours and PyMilvus's own, live through the same outage: ours call once, with a timeout of
30 s, while the server is away; those of PyMilvus, whose calls fail at once then, every 50 ms until
one is answered. Time counts from when the port is open. Connects are those that succeeded: for
ours, connections that reached the server through a proxy; for PyMilvus, its own count of
reconnects (they may share a socket).

Each call writes a row; afterwards all of them must be there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Before what is imported from the tests: they are no package of ours.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rpc.handlers import eventually
from tests.rpc.milvus_server import MilvusServer

from _harness import Figure, Report, main
from _rpc_recovery_sides import Outage, Seen, Side, in_coroutines, in_threads, prepare, written
from moored.rpc.milvus import MilvusClient, MilvusManager
from moored.testing import FaultProxy

CALLERS = 20
QUICK = (2.0, 2.0, 6.0)
FULL = (2.0,) * 5 + (6.0,) * 5 + (20.0,) * 3


class HttpLocation:
    """The server, and somebody who looks after what is written there."""

    def __init__(self, server: MilvusServer, keeper: MilvusClient, start_takes: float) -> None:
        self.server = server
        self._keeper = keeper
        self._start_takes = start_takes
        self._numbers = itertools.count(1)
        #: When the port was last opened, and for how long it was closed each time.
        self.opened_at = 0.0
        self.outages: list[float] = []

    @property
    def uri(self) -> str:
        return self.server.uri

    def collections(self, number: int) -> tuple[list[str], list[str]]:
        """One for each caller of both sides."""
        prefix = f"round_{next(self._numbers)}"
        return (
            prepare(self._keeper, f"{prefix}_ours", number),
            prepare(self._keeper, f"{prefix}_theirs", number),
        )

    def outage(self, seconds: float) -> Outage:
        """The port is closed for so long."""

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
        """Every row of calls that were answered must be there."""
        if (found := written(self._keeper, names)) < len(names) - lost:
            raise AssertionError(f"of {len(names)} rows, {lost} calls failed, {found} are there")


@contextmanager
def place() -> Iterator[HttpLocation]:
    with tempfile.TemporaryDirectory() as folder, MilvusManager() as manager:
        begun = time.perf_counter()
        with MilvusServer(Path(folder) / "data") as server:
            takes = time.perf_counter() - begun
            yield HttpLocation(server, MilvusClient(server.uri, manager=manager), takes)


def first_call(here: HttpLocation, seconds: float) -> tuple[float, float, int]:
    """One caller on each side: the milliseconds of both, and how many calls of ours failed."""
    names, their_names = here.collections(1)
    ours, theirs = in_threads(
        Side(here.uri, names), Side(here.uri, their_names), here.outage(seconds)
    )
    here.check(names, ours.failed)
    here.check(their_names, 0)
    took = [(seen.first - here.opened_at) * 1000 for seen in (ours, theirs)]
    return took[0], took[1], ours.failed


def many(here: HttpLocation, threads: bool) -> tuple[int, Seen, Seen]:
    """Many callers on each side; how often ours connected, and what both saw."""
    names, their_names = here.collections(CALLERS)
    with FaultProxy("127.0.0.1", here.server.port).in_thread() as proxy:
        sides = (Side(f"http://127.0.0.1:{proxy.port}", names), Side(here.uri, their_names))
        outage = here.outage(2.0)
        if threads:
            ours, theirs = in_threads(*sides, outage)
        else:
            ours, theirs = asyncio.run(in_coroutines(*sides, outage))
        told = proxy.statistics()
    # The first one was before the outage.
    connects = told.accepted - told.refused - 1
    if ours.connects != connects:
        raise AssertionError(f"{connects} connects, and {ours.connects} more generations")
    here.check(names, ours.failed)
    here.check(their_names, 0)
    return connects, ours, theirs


def milliseconds(values: list[float]) -> Figure:
    return Figure(statistics.median(values), "ms", min(values), max(values))


def counted(values: list[int]) -> Figure:
    return Figure(max(values), "", min(values), max(values))


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.ERROR)  # what breaks here is broken on purpose
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    with place() as here:
        alone = [first_call(here, seconds) for seconds in (QUICK if quick else FULL)]
        report.add("first_call_ms_p50", milliseconds([ours for ours, _, _ in alone]))
        report.add("pymilvus_first_call_ms_p50", milliseconds([theirs for _, theirs, _ in alone]))
        lost = sum(failed for *_, failed in alone)
        for what in ("threads", "coroutines"):
            rounds = [many(here, what == "threads") for _ in range(1 if quick else 3)]
            report.add(f"connects_per_outage_{what}", counted([ours for ours, _, _ in rounds]))
            report.add(
                f"pymilvus_connects_per_outage_{what}",
                counted([theirs.connects for _, _, theirs in rounds]),
            )
            lost += sum(ours.failed for _, ours, _ in rounds)
        report.add("calls_lost", Figure(lost))
        shown = ", ".join(f"{seconds:.1f}" for seconds in here.outages)
    report.notes.append(f"the port was closed for {shown} s; every row was looked for")
    report.notes.append(
        f"{CALLERS} callers on each side for the connects; the load was {load:.1f} on "
        f"{processors} processors before, {os.getloadavg()[0]:.1f} after"
        + (" (too busy to believe the figures)" if load > processors else "")
    )


if __name__ == "__main__":
    main("rpc_recovery", (__doc__ or "").splitlines()[0], measure)
