"""Errors that are kept without the stack frames that they came through."""

from __future__ import annotations

__all__ = ["forget_frames"]


def forget_frames(error: BaseException | None) -> None:
    """Of an error that is kept, keep what it says, and not the frames that it came through.

    In those frames is what a driver was working at: a socket that stays open as long as somebody
    has the error, and a task that was cancelled has its error. So whatever gives up a connect calls
    this, and the other side sees the end at once, not after a garbage collection.
    """
    seen = set[int]()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
