"""How much of what could be tested is tested here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from moored.testing import scaled

__all__ = ["thorough"]

T = TypeVar("T")


def thorough(core: Sequence[T], everything: Sequence[T]) -> Sequence[T]:
    """All of it at full scale, and the core of it at a smaller one."""
    return everything if scaled(10) >= 10 else core
