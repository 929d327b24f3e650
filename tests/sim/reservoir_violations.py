"""Violated expectations of a simulation: recorded where they happen, raised at the end."""

from __future__ import annotations

from moored.testing import Sim

__all__ = ["EXACT", "Violations"]

# The tolerance of virtual times, for rounding errors of floats.
EXACT = 1e-6


class Violations:
    """Records violations. (A pool survives exceptions of its hooks, so hooks cannot just raise.)

    Each violation is also a line of the trace.
    """

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._wrong: list[str] = []

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._sim.now

    def expect(self, held: bool, what: str) -> None:
        """Record a violation, described by `what`, unless the condition held."""
        if not held:
            self._wrong.append(f"{what} at {self.now:.6f} s")
            self._sim.note(f"WRONG: {what}")

    def raise_first(self) -> None:
        """Raise the first violation, with the next ones as its note."""
        if self._wrong:
            error = AssertionError(self._wrong[0])
            error.add_note("\n".join(self._wrong[1:10]))
            raise error
