"""Moored works where `asyncio.eager_task_factory` runs a task's first step at once.

The programs need the standard library alone, so that any interpreter with eager tasks can run
them. On Python 3.11, which has none, they run with ordinary tasks.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kernel import eager_program as kernel_program
from tests.sessions import eager_program as sessions_program
from tests.testing.test_interpreters import NEWEST, ROOT, find


def run(version: str, program: Path, scenarios: list[Callable[[], Any]]) -> None:
    path = find(version)
    if path is None:
        pytest.skip(f"there is no Python {version} here")
    done = subprocess.run(
        [path, "-W", "error", str(program)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "never awaited" not in done.stderr
    assert "was destroyed" not in done.stderr
    assert done.stdout.split()[: len(scenarios)] == [each.__name__ for each in scenarios]


@pytest.mark.parametrize("version", NEWEST)
def test_the_kernel_works_under_eager_tasks(version: str) -> None:
    run(version, Path(kernel_program.__file__), kernel_program.SCENARIOS)


@pytest.mark.parametrize("version", NEWEST)
def test_sessions_and_leases_work_under_eager_tasks(version: str) -> None:
    run(version, Path(sessions_program.__file__), sessions_program.SCENARIOS)
