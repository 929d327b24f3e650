"""Parameters of a test of which `make test` runs a few, and `make soak` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["some_of"]


def some_of(values: Iterable[Any], *quick: Any) -> list[Any]:
    """One parameter for each value; those that are not in `quick` are marked `soak`."""
    known = list(values)
    assert all(each in known for each in quick), quick
    return [each if each in quick else pytest.param(each, marks=pytest.mark.soak) for each in known]
