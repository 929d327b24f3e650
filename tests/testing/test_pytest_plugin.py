"""The pytest plugin, in a project that has Moored installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.programs import run_program

PLUGIN = "moored.testing.plugin"
LIMIT = 100.0
SUITE = """
from moored.testing import simulate

async def scenario(sim):
    assert sim.seed != 105, "an unlucky seed"

def test_scenario():
    print(simulate(scenario, 50, first_seed=100))
"""


def run_pytest(folder: Path, *arguments: str, **environment: str) -> str:
    (folder / "test_suite.py").write_text(SUITE)
    clean = {name: value for name, value in os.environ.items() if "MOORED" not in name}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take seconds to import
    done = run_program(
        *("pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *arguments),
        timeout=LIMIT,
        cwd=folder,
        environ=clean | environment,
    )
    return done.stdout + done.stderr


def test_a_failed_seed_prints_the_command_to_repeat_it(tmp_path: Path) -> None:
    output = run_pytest(tmp_path)
    assert "seed 105 failed (6 of 50 schedules): AssertionError: an unlucky seed" in output
    assert "MOORED_SIM_SEED=105 pytest 'test_suite.py::test_scenario'" in output


def test_the_option_sets_the_number_of_seeds(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--sim-seeds", "5", "-s")
    assert "5 schedules" in output
    assert "1 passed" in output


def test_the_variable_runs_one_seed_alone(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "-v", MOORED_SIM_SEED="105")
    assert "every simulation runs seed 105 alone" in output
    assert "seed 105 failed (1 of 1 schedules)" in output


@pytest.mark.soak
def test_xdist_workers_use_the_option(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    assert "1 passed" in run_pytest(tmp_path, "-p", "xdist", "--sim-seeds", "5", "-n", "2")


def test_a_number_of_seeds_below_one_is_refused(tmp_path: Path) -> None:
    assert "--sim-seeds must be at least 1, not 0" in run_pytest(tmp_path, "--sim-seeds", "0")


def test_pytest_loads_the_plugin_by_its_entry_point() -> None:
    found = entry_points(group="pytest11", name="moored")
    assert [entry.value for entry in found] == [PLUGIN]


def test_the_plugin_does_not_import_the_simulator() -> None:
    program = (
        "import sys, moored.testing.plugin\n"
        "print([name for name in sys.modules if name.startswith('moored.')])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "['moored._version', 'moored.testing', 'moored.testing.plugin']"
