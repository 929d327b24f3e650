"""The only place where Moored registers callbacks for `os.fork()`."""

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
    """Call these functions around each fork of this process, until the process ends.

    After a fork, the callbacks run in the order in which they were registered: the packages that a
    package imports have been reset before its own callback runs. On a platform without `os.fork`,
    this does nothing.
    """
    if not hasattr(os, "register_at_fork"):
        return
    given = {
        "before": before,
        "after_in_parent": after_in_parent,
        "after_in_child": after_in_child,
    }
    os.register_at_fork(**{name: call for name, call in given.items() if call is not None})
