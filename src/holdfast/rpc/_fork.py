"""What happens to managers when their process is forked.

gRPC has threads of its own, and a fork copies none of them: a child that is made while a call is
under way may wait for ever for one that does not exist. So calls are held up for the moment of the
fork, those under way are waited for, and the child begins with no connection at all.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["register"]

#: How long a fork waits for calls that are under way.
PATIENCE = 5.0


class Forks(Protocol):
    """What must be told of forks."""

    def _before_fork(self, patience: float) -> None: ...
    def _after_fork_in_parent(self) -> None: ...
    def _after_fork_in_child(self) -> None: ...


_known: weakref.WeakSet[Forks] = weakref.WeakSet()


def register(manager: Forks) -> None:
    """Tell it of forks from now on, as long as it lives."""
    _known.add(manager)


def _before() -> None:
    for manager in list(_known):
        manager._before_fork(PATIENCE)


def _in_parent() -> None:
    for manager in list(_known):
        manager._after_fork_in_parent()


def _in_child() -> None:
    for manager in list(_known):
        manager._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
