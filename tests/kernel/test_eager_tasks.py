"""Moored works where `asyncio.eager_task_factory` runs a task's first step at once.

The programs need the standard library alone, so that the newest interpreter that is installed can
run them, too. On Python 3.11, which has no eager tasks, they run with ordinary ones.
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
from tests.testing.test_interpreters import ROOT, interpreter


def run(which: str, program: Path, scenarios: list[Callable[[], Any]]) -> None:
    done = subprocess.run(
        [interpreter(which), "-W", "error", str(program)],
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


@pytest.mark.parametrize("which", ["this", "newest"])
def test_the_kernel_works_under_eager_tasks(which: str) -> None:
    run(which, Path(kernel_program.__file__), kernel_program.SCENARIOS)


@pytest.mark.parametrize("which", ["this", "newest"])
def test_sessions_and_leases_work_under_eager_tasks(which: str) -> None:
    run(which, Path(sessions_program.__file__), sessions_program.SCENARIOS)
