"""Do callers notice when fifty connections that were opened together expire?

Fifty connections are opened at once, through a proxy; from then on the proxy allows 20 new ones per
second (and 20 at once), and sends FATAL 53400 to those over the limit. The maximum lifetime is 8 s.
A hundred workers check out a connection, run `SELECT 1`, hold the connection for 20 ms, return it
and sleep for 40 ms; after an error they sleep for 10 ms. The figure is the worst second.

The baseline is the same work on a pool without expiry. It runs at the same time, on the same event
loop and through the same proxy, with a hundred workers of its own, so that other load on the
machine slows both down. A pool is compared with its own baseline, so the figure is the loss caused
by expiry alone; the CPU time of opening connections, some milliseconds per second, slows both.
That favours the peers: their failed connects slow their baseline, too.

The workers sleep most of the time. If other load is so high that even the baseline cannot keep up,
all workers wait for the CPU and the figure has no meaning. So a run counts only if the baseline did
three fifths of the work in most of its seconds, and is repeated otherwise, whatever its result.
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
#: With `--quick`: seconds for ours (two lifetimes) and for each peer (one, and time to connect).
QUICK = (17, 13)
#: Runs of ours without `--quick`; the figure is their median.
RUNS = 3
#: The operations per second of the baseline for a run to count.
ENOUGH = 0.6 * WORKERS / (HOLD + THINK)


class Program:
    """Another process, with lines on its standard input and output."""

    def __init__(self, *arguments: str) -> None:
        self._name = " ".join(arguments[:2])
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"{self._name} ended too early")
        return line.strip()

    def close(self) -> None:
        """Close the input of the process, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    started = Program(*arguments)
    try:
        yield started
    finally:
        started.close()


class Run(NamedTuple):
    """The tallies of one pool and of its baseline."""

    pool: Tally
    baseline: Tally
    rejects: int

    @property
    def worst_vs_baseline(self) -> float:
        return min(self.pool.done) / max(1, min(self.baseline.done))

    @property
    def counts(self) -> bool:
        """Whether the machine was idle enough."""
        return statistics.median(self.baseline.done) >= ENOUGH

    @property
    def errors(self) -> int:
        return sum(self.pool.kinds.values())

    @property
    def lines(self) -> Lines:
        """The values to plot."""
        pairs = zip(self.pool.done, self.baseline.done, strict=True)
        return Lines([100 * done / max(1, beside) for done, beside in pairs], self.pool.connects)

    def check(self) -> None:
        """Check that the baseline was undisturbed, and that expired connections were replaced.

        A machine that is too busy for the baseline may be too busy for that, too.
        """
        if not self.counts:
            return
        if self.baseline.kinds or sum(self.baseline.connects):
            raise AssertionError(f"the baseline was disturbed: {self.baseline}")
        due = int(len(self.pool.done) / LIFETIME) * SIZE
        if sum(self.pool.connects) < 0.8 * due:
            raise AssertionError(f"fewer connects than expired connections: {self.pool.connects}")


def run(name: str, server: SyncEmbeddedPostgres, seconds: int) -> Run:
    """Fill a pool, set the limit, and run the workers."""
    behind = make_url(server.url)
    where = f"{behind.host}:{behind.port}"
    with program("-m", "moored.testing.proxy", where, "--answer", "53400") as proxy:
        port = int(proxy.read_line().split(",")[0].rpartition(":")[2])
        through = behind.set(host="127.0.0.1", port=port).update_query_dict({"sslmode": "disable"})
        url = through.render_as_string(hide_password=False)
        with program(str(HERE / "_herd_side.py"), name, url, str(seconds)) as side:
            if side.read_line() != "full":
                raise AssertionError(f"{name} was not filled")
            proxy.write_line(f"limit {RATE:g} {RATE:g}")
            proxy.read_line()
            side.write_line("go")
            found = json.loads(side.read_line())
        proxy.write_line("status")
        proxy.read_line()
        counts = dict(part.split("=") for part in proxy.read_line().split())
    done = Run(Tally(**found["pool"]), Tally(**found["baseline"]), int(counts["limited"]))
    done.check()
    return done


def runs_of(
    name: str, server: SyncEmbeddedPostgres, seconds: int, *, wanted: int, tries: int
) -> list[Run]:
    """Return `wanted` runs that count; if there is none, the one with the best baseline."""
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
        f"{SIZE} connections, {WORKERS} workers; our new connections, second by second: "
        f"{' '.join(map(str, runs['ours'][0].pool.connects))}; every answer checked, and of ours "
        f"that no connection was handed out after {LIFETIME:g} s"
    )
    if quick:
        report.notes.append(f"quick: ours for {ours} s, once, and each peer for {peers} s")
    lines = {name: each[0].lines for name, each in runs.items()}
    title = (
        f"{SIZE} connections, opened together, with a lifetime of {LIFETIME:g} s; {WORKERS} workers"
    )
    report.draw = lambda path: draw(lines, path=path, title=title, rate=RATE)


if __name__ == "__main__":
    main("herd", (__doc__ or "").splitlines()[0], measure)
