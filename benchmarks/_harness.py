"""How a benchmark is run and told: one question a file, peers in the same run, work verified.

A figure against a peer is the median of paired ratios (ours, peer, ours, peer, …) with its spread,
because the machine is noisy and both sides meet the same noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True)
class Figure:
    """One number, what it counts, and between which values its rounds lay."""

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        words = f"{_number(self.value)} {self.unit}".rstrip()
        if self.low is None or self.high is None:
            return words
        return f"{words}  ({_number(self.low)} … {_number(self.high)})"


@dataclass
class Report:
    """What a benchmark found, and notes for the reader."""

    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: Draws a picture of its own into a file, instead of bars for the figures.
    draw: Callable[[str], None] | None = None

    def add(self, name: str, figure: Figure) -> None:
        """Add a figure and say so at once: a long run shows its progress."""
        self.figures[name] = figure
        print(f"  {name:<34} {figure}", file=sys.stderr, flush=True)


def timed(work: Callable[[], object]) -> float:
    """The seconds that some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def paired(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> Figure:
    """The median of ours / peer over rounds, where both give a speed (more is better)."""
    ratios = [ours() / peer() for _ in range(rounds)]
    return Figure(statistics.median(ratios), "times", min(ratios), max(ratios))


def repeated(measure: Callable[[], float], rounds: int, unit: str) -> Figure:
    """The median of several rounds of one measure."""
    values = [measure() for _ in range(rounds)]
    return Figure(statistics.median(values), unit, min(values), max(values))


def main(
    name: str,
    question: str,
    measure: Callable[[Report, bool], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run one benchmark from its command line and print what it found."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=question)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: within 45 s")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the figures into a picture")
    options = parser.parse_args(arguments)
    print(f"{name}: {question}", file=sys.stderr)
    report = Report()
    measure(report, options.quick)
    for note in report.notes:
        print(f"  {note}", file=sys.stderr)
    if options.plot:
        (report.draw or partial(_plot, name, report))(options.plot)
    if options.json:
        figures = {key: figure.value for key, figure in report.figures.items()}
        print(json.dumps({"benchmark": name, "figures": figures}))
    else:
        _table(name, report)


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
