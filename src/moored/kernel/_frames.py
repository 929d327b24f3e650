"""Errors without the stack frames that they passed through."""

from __future__ import annotations

__all__ = ["forget_frames"]


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of its causes, so that it keeps no frames alive.

    The frames hold the objects that a driver was using, such as a socket, which stays open as long
    as the error is referenced; a cancelled task references its error. Code that gives up a connect
    calls this, so that the server sees the end at once, and not after a garbage collection.
    """
    seen = set[int]()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
