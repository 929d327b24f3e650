"""Planted defects that simulations must catch, as parameters of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moored.testing import Mutant

__all__ = ["planted_defects"]


def planted_defects(mutants: Sequence[Mutant], *late: str) -> list[Any]:
    """One parameter for each; `late` names those that take many schedules until caught: `soak`."""
    unknown = set(late) - {each.name for each in mutants}
    assert not unknown, unknown
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.soak] if each.name in late else [])
        for each in mutants
    ]
