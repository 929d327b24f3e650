"""The send window: the unanswered sends of a link, and whether one more may be written."""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """The unanswered sends of one link."""

    __slots__ = ("_again", "_draining", "_size", "_unanswered")

    def __init__(self) -> None:
        self._size: int | None = None
        # (The keys of a dict, cleared when it is empty: an empty set takes 216 bytes.)
        self._unanswered: dict[str, None] = {}
        # The ids of those that were written twice, and get two answers.
        self._again: tuple[str, ...] = ()
        self._draining = False

    def resize(self, size: int | None) -> None:
        """Set the number of sends that may be unanswered; None for no limit."""
        self._size = size

    def drain(self) -> None:
        """Allow no new sends until all are answered: some of the last link are still held back."""
        self._draining = True

    @property
    def is_open(self) -> bool:
        """Whether one more send may be written."""
        if self._draining and self._unanswered:
            return False
        self._draining = False
        return self._size is None or len(self._unanswered) + len(self._again) < self._size

    def wrote(self, id: str) -> None:
        """Count a send that was written."""
        if id in self._unanswered:
            self._again = (*self._again, id)
        else:
            self._unanswered[id] = None

    def answered(self, id: str) -> None:
        """Remove a send that was confirmed or refused; duplicate answers are ignored."""
        if id in self._again:
            again = list(self._again)
            again.remove(id)
            self._again = tuple(again)
        else:
            self._unanswered.pop(id, None)
            if not self._unanswered:
                self._unanswered.clear()
