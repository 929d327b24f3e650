"""The one place where the library registers what happens around `os.fork()`."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["at_fork"]


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """Call these around each fork of this process, for the rest of its life.

    After a fork, the callbacks run in the order in which they were registered, so that a package
    finds the packages that it imports renewed. Without forks on this platform, it does nothing.
    """
    if not hasattr(os, "register_at_fork"):
        return
    given = {
        "before": before,
        "after_in_parent": after_in_parent,
        "after_in_child": after_in_child,
    }
    os.register_at_fork(**{name: call for name, call in given.items() if call is not None})
