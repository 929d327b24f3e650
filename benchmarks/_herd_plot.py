"""The plot of herd.py: operations and new connections per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: The label and the colour of each pool; the last is drawn on top.
LOOKS = {
    "sqlalchemy": ("SQLAlchemy", "#c2a33a"),
    "asyncpg": ("asyncpg", "#c0504d"),
    "psycopg_pool": ("psycopg_pool", "#8064a2"),
    "ours": ("Moored", "#1f6f8b"),
}
INK = "#333333"
STYLE: dict[Any, Any] = {
    # Text stays text: a small file that can be searched.
    "svg.fonttype": "none",
    "svg.hashsalt": "herd",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#bbbbbb",
    "xtick.color": INK,
    "ytick.color": INK,
}


class Lines(NamedTuple):
    """The plotted values of one pool, second by second."""

    #: Operations, in percent of the baseline in the same second.
    done: list[float]
    connects: list[int]


def draw(runs: Mapping[str, Lines], *, path: str, title: str, rate: float) -> None:
    """Plot operations per second, and connects per second below, into a file.

    Operations are relative to the baseline: the pools ran one after the other, under different
    loads of the machine.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=(3, 2), facecolor="white"
    )
    for name, (label, color) in LOOKS.items():
        if name in runs:
            width = 2.8 if name == "ours" else 1.6
            done, connects = runs[name]
            middles = [second + 0.5 for second in range(len(done))]
            above.plot(middles, done, label=label, color=color, linewidth=width)
            below.stairs(connects, baseline=None, color=color, linewidth=width)
    _dress_above(above, title)
    _dress_below(below, rate, max(len(lines.done) for lines in runs.values()))
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)


def _dress(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _dress_above(axes: Any, title: str) -> None:
    _dress(axes, "operations per second,\n% of those without expiry")
    axes.set_title(title, loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="lower left", ncols=2, frameon=False)


def _dress_below(axes: Any, rate: float, seconds: int) -> None:
    _dress(axes, "new connections per second")
    axes.set_xlabel("seconds")
    axes.set_xlim(0, seconds)
    axes.set_xticks(range(0, seconds + 1, 2))
    axes.axhline(rate, color="#999999", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"allowed: {rate:g} per second",
        (0, rate),
        xytext=(5, 4),
        textcoords="offset points",
        fontsize=9,
        color="#777777",
    )
