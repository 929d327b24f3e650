"""A simulation whose oracle never meets a condition tests nothing there, and stays green."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moored.testing import run_one
from moored.testing._run import Scenario

__all__ = ["assert_reached"]


def assert_reached(
    scenario: Scenario[Counter[str]], conditions: Iterable[str], *, within: int
) -> None:
    """Assert that the schedules of the first seeds reach each of these conditions.

    The scenario returns how often each condition of its oracle was reached.
    """
    wanted, reached = set(conditions), Counter[str]()
    for seed in range(within):
        reached += run_one(scenario, seed).result()
        if wanted <= reached.keys():
            return
    raise AssertionError(
        f"never reached in {within} schedules: {sorted(wanted - reached.keys())}; {reached}"
    )
