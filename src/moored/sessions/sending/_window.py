"""The send window: how many sends are written and unanswered, and whether more may be."""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """The unanswered sends of one link."""

    __slots__ = ("_again", "_draining", "_size", "_unanswered")

    def __init__(self) -> None:
        self._size: int | None = None
        # (The keys of a dict, cleared when it is empty: an empty set takes 216 bytes.)
        self._unanswered: dict[str, None] = {}
        # Those of them that were written once more with the same id, which has two answers.
        self._again: tuple[str, ...] = ()
        self._draining = False

    def resize(self, size: int | None) -> None:
        """The server has said how many it takes at once; None for any number."""
        self._size = size

    def drain(self) -> None:
        """Some sends of the last link are kept back: write no new ones before all are answered."""
        self._draining = True

    @property
    def is_open(self) -> bool:
        """Whether one more may be written."""
        if self._draining and self._unanswered:
            return False
        self._draining = False
        return self._size is None or len(self._unanswered) + len(self._again) < self._size

    def wrote(self, id: str) -> None:
        """One was written."""
        if id in self._unanswered:
            self._again = (*self._again, id)
        else:
            self._unanswered[id] = None

    def answered(self, id: str) -> None:
        """One was confirmed or refused; what is answered twice counts once."""
        if id in self._again:
            again = list(self._again)
            again.remove(id)
            self._again = tuple(again)
        else:
            self._unanswered.pop(id, None)
            if not self._unanswered:
                self._unanswered.clear()
