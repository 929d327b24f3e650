"""Generation numbers, by which an error from a replaced connection is recognised and ignored."""

from __future__ import annotations

import threading

from ._errors import StaleGeneration

__all__ = ["Generation"]


class Generation:
    """A number that grows each time an object, such as a connection, is replaced.

    A user of the object keeps the number as a token and passes it with each result or error: those
    with an older token are ignored. Methods may be called from any thread.
    """

    __slots__ = ("_current", "_lock")

    def __init__(self) -> None:
        self._current = 0
        self._lock = threading.Lock()

    @property
    def current(self) -> int:
        """The token of the current object; 0 before the first."""
        return self._current

    def next(self) -> int:
        """Return the token of a new object; every earlier token is now stale."""
        with self._lock:
            self._current += 1
            return self._current

    def is_current(self, token: int) -> bool:
        """Whether the token belongs to the current object."""
        return token == self._current

    def check(self, token: int, what: str = "this") -> None:
        """Raise `StaleGeneration` unless the token belongs to the current object."""
        current = self._current
        if token != current:
            raise StaleGeneration(
                f"{what} is of generation {token}, but {current} is current: "
                "it has been replaced; drop it and use the current one"
            )

    def __repr__(self) -> str:
        return f"<Generation {self._current}>"
