"""A consumer as the hub knows it, attached or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._lsn import Lsn
from .._position import Position
from ._backlog import Backlog
from ._consumer import Attachment, Changes, Reset
from ._progress import Progress
from ._store import Saved
from ._tables import Followed

__all__ = ["KnownConsumer", "progress_of"]


@dataclass(eq=False)
class KnownConsumer:
    """A consumer that is known by its name."""

    name: str
    #: None before its first position, and after a reset.
    progress: Progress | None = None
    #: Its stored position.
    stored: int = 0
    #: The reset that it has not handled yet.
    reset: Reset | None = None
    #: The tables that it follows, as they were last confirmed.
    followed: dict[str, Followed] = field(default_factory=dict)
    #: The attachment whose acknowledgements are valid, also after its end.
    attachment: Attachment | None = None
    #: Whether its tables were confirmed since the last reset: only then it gets a `Reset` and later
    #: transactions.
    confirmed: bool = False
    #: The number of the check that has confirmed its tables last.
    checked: int = 0
    #: Whether it was not given transactions because it was not confirmed.
    skipped: bool = False
    #: The transactions that it would need again if it attached again.
    backlog: Backlog | None = None
    #: Whether it needs transactions which only the server has: until these are sent again, it is
    #: given none.
    behind: bool = False
    #: A `start=` that was not checked against the server yet.
    start: Position | None = None

    def describe(self, changes: Changes | None, seen: int, *, full: bool) -> dict[str, object]:
        """Return its state as plain data.

        :param changes: the consumer, if it is attached.
        :param seen: the end of the last transaction that was applied.
        :param full: whether its queue is full.
        """
        progress = self.progress
        return {
            "attached": changes is not None,
            "acknowledged": None if progress is None else str(Lsn(progress.acknowledged)),
            "behind": progress is not None and progress.acknowledged < seen,
            "outstanding": 0 if progress is None else progress.outstanding,
            "queued": 0 if changes is None else len(changes._queue),
            "queued_bytes": 0 if changes is None else changes._bytes,
            "full": full,
            "reset": None if self.reset is None else self.reset.reason,
            "unpublished": [] if changes is None else changes.unpublished,
        }


def progress_of(saved: Saved) -> Progress | None:
    """Return the progress of a consumer as it was stored."""
    return None if saved.acknowledged is None else Progress(saved.acknowledged, saved.delivered)
