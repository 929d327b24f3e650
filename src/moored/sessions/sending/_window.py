"""The send window: the unanswered sends of a link, and whether one more may be written."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Window"]


@dataclass(slots=True, eq=False, repr=False)
class Window:
    """The unanswered sends of one link."""

    _size: int | None = None
    # (The keys of a dict, cleared when it is empty: an empty set takes 216 bytes.)
    _unanswered: dict[str, None] = field(default_factory=dict)
    # The ids of those that were written twice, and get two answers.
    _again: tuple[str, ...] = ()
    _draining: bool = False

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
