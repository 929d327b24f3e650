"""Generation tokens: an error from a replaced connection changes nothing."""

from __future__ import annotations

import threading

from ._errors import StaleGeneration

__all__ = ["Generation"]


class Generation:
    """A number that grows each time something is replaced.

    A user of the thing keeps the number as a token and passes it with each result or error: only
    those with the current token count. Methods may be called from any thread.
    """

    __slots__ = ("_current", "_lock")

    def __init__(self) -> None:
        self._current = 0
        self._lock = threading.Lock()

    @property
    def current(self) -> int:
        """The token of the current one; 0 before the first."""
        return self._current

    def next(self) -> int:
        """Replace the current one: every token given out before is stale from now on."""
        with self._lock:
            self._current += 1
            return self._current

    def is_current(self, token: int) -> bool:
        """Whether the token belongs to the current one."""
        return token == self._current

    def check(self, token: int, what: str = "this") -> None:
        """Raise `StaleGeneration` unless the token belongs to the current one."""
        current = self._current
        if token != current:
            raise StaleGeneration(
                f"{what} is of generation {token}, but {current} is current: "
                "it has been replaced meanwhile; drop it and take the current one"
            )

    def __repr__(self) -> str:
        return f"<Generation {self._current}>"
