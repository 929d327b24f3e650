"""File descriptors that are closed in a forked child process."""

from __future__ import annotations

import os

from moored.kernel import at_fork

__all__ = ["OwnedDescriptor"]

_open: set[int] = set()


class OwnedDescriptor:
    """An open descriptor that is closed in a forked child process.

    A fork without exec (multiprocessing, a pre-forking server) copies every descriptor. A copy of
    the pipe to a guard would hide the death of this process from the guard, and a copy of the lock
    would hide the end of the server.
    """

    __slots__ = ("_number",)

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        _open.add(descriptor)

    @property
    def descriptor(self) -> int:
        """The number of the descriptor, or -1 once it is closed."""
        return self._number

    @property
    def open(self) -> bool:
        """Whether the descriptor is open, in this process."""
        return self._number in _open

    def close(self) -> None:
        """Close the descriptor; closing it again has no effect."""
        if self.open:
            _open.discard(self._number)
            os.close(self._number)
            self._number = -1


def _close_in_child() -> None:
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


at_fork(after_in_child=_close_in_child)
