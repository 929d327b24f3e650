"""Each benchmark runs as CONTRIBUTING says, with nothing but the files of the last commit."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from .pages import ROOT, last_commit
from .reader import Terminal

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NAMES = sorted(path.stem for path in ROOT.glob("benchmarks/[a-z]*.py"))
TARGETS = tomllib.loads((ROOT / "benchmarks" / "targets.toml").read_text())
#: A short run takes less than a minute, without other tests beside it.
LIMIT = 1200.0


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the last commit, with the Python of these tests."""
    copy = last_commit(tmp_path_factory.mktemp("benchmarks") / "clone")
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # No link to the environment: PostgreSQL runs as another user, who may not enter this folder.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs_as_documented_and_measures_all_that_has_a_target(
    name: str, clone: Path
) -> None:
    text = (clone / "CONTRIBUTING.md").read_text()
    (python,) = re.findall(r"^\$ (\S+) benchmarks/\w+\.py ", text, re.MULTILINE)
    command = f"{python} benchmarks/{name}.py --quick --json"
    with Terminal.opened(command, clone, PYTHONPATH=str(clone / "src")) as terminal:
        terminal.wait_ended(LIMIT)
        (line,) = re.findall(r"^\{.*\}$", terminal.printed, re.MULTILINE)
    figures = json.loads(line)["figures"]
    assert figures
    assert TARGETS.get(name, {}).keys() <= figures.keys()
