"""Do callers notice when fifty connections that were born together reach the end of their life?

Fifty connections are opened at once, through a proxy; from then on it allows 20 new ones a second
(and 20 at once), and answers FATAL 53400 to those over it. No connection may live longer than 8 s.
A hundred workers take a connection, ask `SELECT 1`, hold it for 20 ms, give it back, and think for
40 ms; after an error they wait for 10 ms. What counts is the worst second.

The baseline is the same work on a pool in which nothing expires. It runs at the same time, on the
same event loop and through the same proxy, with a hundred workers of its own: whatever slows the
machine down in some second, slows both down in this second. A pool is compared with the baseline
that ran beside it. So the figure tells what callers miss because connections end, and not what the
machine does besides; the work of opening connections itself, some milliseconds in a second, is
borne by both. Figures of the peers are flattered by this: their failed connects slow down the
baseline too.

The work is one that sleeps most of the time. Where the machine has so much else to do that even
the baseline cannot do it, the connections are too few for a hundred workers who are kept waiting
by the processor, and the question has no answer. So a run counts only if the baseline did three
fifths of the work in most of its seconds, and is repeated otherwise, whatever came out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import make_url

from _harness import Figure, Report, main
from _herd_plot import Lines, draw
from _herd_pools import LIFETIME, POOLS, RATE, SIZE
from _herd_side import HOLD, THINK, WORKERS, Tally
from moored.embedded import SyncEmbeddedPostgres

HERE = Path(__file__).parent
SECONDS = 20
#: With `--quick`: ours for two lifetimes, the peers for one and what follows.
QUICK = (17, 10)
#: How many runs of ours count, without `--quick`: the figure is their median.
RUNS = 3
#: What the baseline must have done in most seconds.
ENOUGH = 0.6 * WORKERS / (HOLD + THINK)


class Program:
    """Another process, which is told lines and answers in lines."""

    def __init__(self, *arguments: str) -> None:
        self._what = " ".join(arguments[:2])
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"{self._what} ended too early")
        return line.strip()

    def end(self) -> None:
        """Its input ends, and so does it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    started = Program(*arguments)
    try:
        yield started
    finally:
        started.end()


class Run(NamedTuple):
    """What one pool did, and the baseline beside it."""

    pool: Tally
    baseline: Tally
    rejects: int

    @property
    def worst_vs_baseline(self) -> float:
        return min(self.pool.done) / min(self.baseline.done)

    @property
    def counts(self) -> bool:
        """Whether the machine had the time for it."""
        return statistics.median(self.baseline.done) >= ENOUGH

    @property
    def errors(self) -> int:
        return sum(self.pool.kinds.values())

    @property
    def lines(self) -> Lines:
        """What is drawn of it."""
        pairs = zip(self.pool.done, self.baseline.done, strict=True)
        return Lines([100 * done / beside for done, beside in pairs], self.pool.births)

    def check(self) -> None:
        """The baseline must be one, and what should have expired must have been born again."""
        if self.baseline.kinds or sum(self.baseline.births):
            raise AssertionError(f"the baseline was disturbed: {self.baseline}")
        due = int(len(self.pool.done) / LIFETIME) * SIZE
        if sum(self.pool.births) < 0.8 * due:
            raise AssertionError(f"fewer births than deaths: {self.pool.births}")


def run(name: str, server: SyncEmbeddedPostgres, seconds: int) -> Run:
    """Fill a pool, begin to limit, and let the workers loose."""
    behind = make_url(server.url)
    where = f"{behind.host}:{behind.port}"
    with program("-m", "moored.testing.proxy", where, "--answer", "53400") as proxy:
        port = int(proxy.hear().split(",")[0].rpartition(":")[2])
        through = behind.set(host="127.0.0.1", port=port).update_query_dict({"sslmode": "disable"})
        url = through.render_as_string(hide_password=False)
        with program(str(HERE / "_herd_side.py"), name, url, str(seconds)) as side:
            if side.hear() != "full":
                raise AssertionError(f"{name} was not filled")
            proxy.tell(f"limit {RATE:g} {RATE:g}")
            proxy.hear()
            side.tell("go")
            found = json.loads(side.hear())
        proxy.tell("status")
        proxy.hear()
        counts = dict(part.split("=") for part in proxy.hear().split())
    done = Run(Tally(**found["pool"]), Tally(**found["baseline"]), int(counts["limited"]))
    done.check()
    return done


def runs_of(
    name: str, server: SyncEmbeddedPostgres, seconds: int, *, wanted: int, tries: int
) -> list[Run]:
    """So many runs that count; if there are none, the one with the least disturbed baseline."""
    found: list[Run] = []
    while len(found) < tries and sum(each.counts for each in found) < wanted:
        found.append(run(name, server, seconds))
    calm = [each for each in found if each.counts]
    return calm or [max(found, key=lambda each: sum(each.baseline.done))]


def add_figures(report: Report, prefix: str, runs: list[Run]) -> None:
    ratios = [each.worst_vs_baseline for each in runs]
    report.add(f"{prefix}errors", Figure(sum(each.errors for each in runs)))
    report.add(f"{prefix}rejects", Figure(sum(each.rejects for each in runs)))
    worst = Figure(statistics.median(ratios), "", min(ratios), max(ratios))
    report.add(f"{prefix}worst_second_vs_baseline", worst)
    seconds = [min(each.pool.done) for each in runs]
    report.add(f"{prefix}worst_second", Figure(statistics.median(seconds), "operations"))


def measure(report: Report, quick: bool) -> None:
    ours, peers = QUICK if quick else (SECONDS, SECONDS)
    runs: dict[str, list[Run]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {"max_connections": str(8 * SIZE)}
        server = stack.enter_context(SyncEmbeddedPostgres(directory / "postgres", options=options))
        for name in POOLS:
            if name == "ours":
                wanted = 1 if quick else RUNS
                runs[name] = runs_of(name, server, ours, wanted=wanted, tries=wanted + 2)
            else:
                runs[name] = runs_of(name, server, peers, wanted=1, tries=1 if quick else 2)
            add_figures(report, "" if name == "ours" else f"{name}_", runs[name])
            if not runs[name][0].counts:
                report.notes.append(f"{name}: the machine was too busy for the baseline")
    beside = [min(each.baseline.done) for each in runs["ours"]]
    report.add("baseline_worst_second", Figure(statistics.median(beside), "operations"))
    report.notes.append(
        f"{SIZE} connections, {WORKERS} workers; births of ours, second by second: "
        f"{' '.join(map(str, runs['ours'][0].pool.births))}; every answer checked, and of ours "
        f"that no connection was handed out after {LIFETIME:g} s"
    )
    if quick:
        report.notes.append(f"quick: ours for {ours} s, once, and each peer for {peers} s")
    lines = {name: each[0].lines for name, each in runs.items()}
    title = f"{SIZE} connections, born together, that live for {LIFETIME:g} s; {WORKERS} workers"
    report.draw = lambda path: draw(lines, path=path, title=title, rate=RATE)


if __name__ == "__main__":
    main("herd", (__doc__ or "").splitlines()[0], measure)
