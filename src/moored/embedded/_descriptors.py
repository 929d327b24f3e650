"""File descriptors that a fork of this process closes at once."""

from __future__ import annotations

import os

from moored.kernel import at_fork

__all__ = ["OwnedDescriptor"]

_open: set[int] = set()


class OwnedDescriptor:
    """An open descriptor that a fork of this process gives up at once.

    A fork without exec (multiprocessing, a pre-forking server) has a copy of every descriptor: of
    the pipe that tells a guard that we live, and of the lock that says that the server does.
    """

    __slots__ = ("_number",)

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        _open.add(descriptor)

    @property
    def descriptor(self) -> int:
        """Its number."""
        return self._number

    @property
    def open(self) -> bool:
        """Whether it is still open, and in this process."""
        return self._number in _open

    def close(self) -> None:
        """Close the descriptor; closing it again has no effect."""
        if self.open:
            _open.discard(self._number)
            os.close(self._number)
            self._number = -1


def _give_up() -> None:
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


at_fork(after_in_child=_give_up)
