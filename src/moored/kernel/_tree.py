"""A supervision tree as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ._words import duration

__all__ = ["Tree"]


@dataclass(frozen=True)
class Tree:
    """One node of a supervision tree and everything below it; `str()` draws it."""

    #: The node's own name.
    name: str
    #: "starting", "running", "waiting" (to restart), "stopping", "finished", "stopped", "failed".
    state: str
    #: Seconds since the node entered that state.
    since: float
    #: A supervisor's strategy; None for a child that is not a supervisor.
    strategy: str | None = None
    #: A child's `Restart` value; None for the root.
    restart: str | None = None
    #: 1 for the first start, one more at each restart.
    generation: int = 1
    #: How often the node was restarted after a failure.
    restarts: int = 0
    #: The newest failure, in one line.
    last_failure: str | None = None
    #: The nodes below, in the order of starting.
    children: tuple[Tree, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the tree as plain data for JSON."""
        return asdict(self)

    def paths(self, above: str = "") -> Iterator[tuple[str, Tree]]:
        """Yield every node with its path ("root/part/child"), parents before their children."""
        path = f"{above}/{self.name}" if above else self.name
        yield path, self
        for child in self.children:
            yield from child.paths(path)

    def __str__(self) -> str:
        rows = list(self._rows("", ""))
        width = max(len(left) for left, _ in rows)
        return "\n".join(f"{left:<{width}}  {right}" for left, right in rows)

    def _rows(self, branch: str, indent: str) -> Iterator[tuple[str, str]]:
        yield branch + self.name, self._summary()
        for child in self.children:
            last = child is self.children[-1]
            yield from child._rows(
                indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")
            )

    def _summary(self) -> str:
        words = f"{self.state} for {duration(self.since)}"
        if self.strategy is not None:
            words += f", {self.strategy}"
        if self.restart is not None:
            words += f", {self.restart}"
        if self.restarts:
            words += ", restarted " + ("once" if self.restarts == 1 else f"{self.restarts} times")
        if self.last_failure is not None:
            words += f"; last failure: {self.last_failure}"
        return words
