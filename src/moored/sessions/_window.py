"""How many sends a server has taken and not answered yet, and whether it takes more."""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """The unanswered sends of one link."""

    __slots__ = ("_again", "_size", "_unanswered")

    def __init__(self) -> None:
        self._size: int | None = None
        self._unanswered: set[str] = set()
        # Those of them that were written once more with the same id, which has two answers.
        self._again: list[str] = []

    def reset(self) -> None:
        """A new link is there."""
        self._size = None
        self._unanswered.clear()
        self._again.clear()

    def resize(self, size: int | None) -> None:
        """The server has said how many it takes at once; None for any number."""
        self._size = size

    @property
    def is_open(self) -> bool:
        """Whether one more may be written."""
        return self._size is None or len(self._unanswered) + len(self._again) < self._size

    def wrote(self, id: str) -> None:
        """One was written."""
        if id in self._unanswered:
            self._again.append(id)
        else:
            self._unanswered.add(id)

    def answered(self, id: str) -> None:
        """One was confirmed or refused; what is answered twice counts once."""
        if id in self._again:
            self._again.remove(id)
        else:
            self._unanswered.discard(id)
