"""Planted defects that simulations must catch, as parameters of a test."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest

from moored.testing import Mutant, mutant

__all__ = ["edited", "planted_defects"]


def planted_defects(mutants: Sequence[Mutant], *late: str) -> list[Any]:
    """One parameter for each; `late` names those that take many schedules until caught: `soak`."""
    unknown = set(late) - {each.name for each in mutants}
    assert not unknown, unknown
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.soak] if each.name in late else [])
        for each in mutants
    ]


def edited(owner: type, name: str, method: str, before: str, after: str) -> Mutant:
    """A class with one edit of the source of a method."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(before) == 1, f"{method}() has {before!r} not once"
    made = dict(vars(sys.modules[owner.__module__]))
    exec(source.replace(before, after), made)
    return mutant(owner, method, made[method], name=name)
