"""What was seen to be wrong: noted where it happens, and raised where nobody swallows it."""

from __future__ import annotations

from moored.testing import Sim

__all__ = ["EXACT", "Watch"]

# How late something may be in virtual time: not at all, but floats have a last digit.
EXACT = 1e-6


class Watch:
    """Collects what must not be. A pool survives what its hooks raise, so they cannot just raise.

    Everything is also a line of the trace, so that a failing seed shows what led to it.
    """

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._wrong: list[str] = []

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._sim.now

    def expect(self, held: bool, what: str) -> None:
        """Note what is wrong unless it held."""
        if not held:
            self._wrong.append(f"{what} at {self.now:.6f} s")
            self._sim.note(f"WRONG: {what}")

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        self._sim.note(text)

    def verdict(self) -> None:
        """Fail the schedule if anything was wrong; the first is what matters."""
        if self._wrong:
            error = AssertionError(self._wrong[0])
            error.add_note("\n".join(self._wrong[1:10]))
            raise error
