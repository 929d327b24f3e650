"""The command line, the report and the statistics of all benchmarks.

Each benchmark answers one question, runs its peers in the same run, and verifies the work. A figure
against a peer is the median of paired ratios (ours, peer, ours, peer, …) with its spread, because
both sides of a pair meet the same noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

#: The figures of the last run of each benchmark with `--save`; README has a table of them.
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Figure:
    """A number with its unit, and the lowest and highest value of its rounds."""

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        text = f"{_number(self.value)} {self.unit}".rstrip()
        if self.low is None or self.high is None:
            return text
        return f"{text}  ({_number(self.low)} … {_number(self.high)})"


@dataclass
class Report:
    """The figures of a benchmark, and notes for the reader."""

    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: Draws a plot into a file, instead of bars for the figures.
    draw: Callable[[str], None] | None = None

    def add(self, name: str, figure: Figure) -> None:
        """Add a figure and print it at once, to show progress."""
        self.figures[name] = figure
        print(f"  {name:<34} {figure}", file=sys.stderr, flush=True)


def spread(values: Sequence[float], unit: str) -> Figure:
    """Return the median, with the minimum and the maximum."""
    return Figure(statistics.median(values), unit, min(values), max(values))


def quartiles(values: Sequence[float], unit: str) -> Figure:
    """Return the median, with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Figure(middle, unit, low, high)


def ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [one / other for one, other in zip(ours, peer, strict=True)]


def paired(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> Figure:
    """Return the median of ours / peer over rounds, where both return a speed (more is better)."""
    return spread([ours() / peer() for _ in range(rounds)], "times")


def side_process(program: str, *arguments: object) -> dict[str, float]:
    """Run one side of a benchmark in a new process, and return the JSON object that it prints."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(
    name: str,
    question: str,
    measure: Callable[[Report, bool], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run one benchmark from the command line and print its figures."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=question)
    parser.add_argument("--quick", action="store_true", help="run fewer rounds, within 45 s")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--plot", metavar="FILE", help="plot the figures into a file")
    parser.add_argument("--save", action="store_true", help=f"write the figures to {RESULTS.name}")
    options = parser.parse_args(arguments)
    print(f"{name}: {question}", file=sys.stderr)
    report = Report()
    load = os.getloadavg()[0]
    measure(report, options.quick)
    report.notes.append(_load_note(load))
    for note in report.notes:
        print(f"  {note}", file=sys.stderr)
    if options.save:
        _save(name, report, options.quick, max(load, os.getloadavg()[0]))
    if options.plot:
        (report.draw or partial(_plot, name, report))(options.plot)
    if options.json:
        figures = {key: figure.value for key, figure in report.figures.items()}
        print(json.dumps({"benchmark": name, "figures": figures}))
    else:
        _table(name, report)


def _load_note(before: float) -> str:
    """Return the load of the machine before and after a run."""
    cpus = os.cpu_count() or 1
    note = f"the load was {before:.1f} on {cpus} CPUs before, {os.getloadavg()[0]:.1f} after"
    return note + (" (too busy for reliable figures)" if before > cpus else "")


def _save(name: str, report: Report, quick: bool, load: float) -> None:
    """Replace the figures of this benchmark in the file of results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        "date": datetime.now(UTC).date().isoformat(),
        "quick": quick,
        "load": round(load, 1),
        "figures": {key: asdict(figure) for key, figure in report.figures.items()},
    }
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _table(name: str, report: Report) -> None:
    width = max(len(key) for key in report.figures)
    print(f"\n{name}")
    for key, figure in report.figures.items():
        print(f"  {key:<{width}}  {figure}")


def _plot(name: str, report: Report, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(report.figures), 1, figsize=(7, 0.9 * len(report.figures) + 0.6), squeeze=False
    )
    for axes, (key, value) in zip(all_axes[:, 0], report.figures.items(), strict=True):
        axes.barh([0], [value.value], color="#3b6ea5", height=0.5)
        if value.low is not None and value.high is not None:
            axes.plot([value.low, value.high], [0, 0], color="#222222", linewidth=2)
        axes.set_yticks([])
        axes.set_title(f"{key}: {value}", loc="left", fontsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
