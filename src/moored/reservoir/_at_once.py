"""Code that is written once, as a coroutine, for pools of asyncio and of threads."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["at_once"]

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a slow path in a pool for threads, in which nothing suspends."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise RuntimeError("a callback of a pool for threads awaited something: use a plain function")
