"""The pytest plugin for simulations: the option `--sim-seeds N`, and a header that shows it.

pytest imports this module at its start in every project that has Moored installed, so it imports
only pytest: the option is passed through the environment, where `simulate()` (also in the workers
of pytest-xdist) reads it.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header"]

_SEED = "MOORED_SIM_SEED"
_SEEDS = "MOORED_SIM_SEEDS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sim-seeds` to pytest's command line."""
    parser.getgroup("moored", "simulation").addoption(
        "--sim-seeds",
        type=int,
        metavar="N",
        help=f"run every simulation over N seeds ({_SEED}=… runs one seed, in this process)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment variable that `simulate()` reads; unset it when pytest ends."""
    seeds = config.getoption("--sim-seeds", default=None)
    if seeds is None:
        return
    if seeds < 1:
        raise pytest.UsageError(f"--sim-seeds must be at least 1, not {seeds}")
    environment = pytest.MonkeyPatch()
    environment.setenv(_SEEDS, str(seeds))
    config.add_cleanup(environment.undo)


def pytest_report_header() -> list[str]:
    """Report an override of the seeds that the tests ask for."""
    if seed := os.environ.get(_SEED):
        return [f"moored: every simulation runs seed {seed} alone ({_SEED})"]
    if seeds := os.environ.get(_SEEDS):
        return [f"moored: every simulation runs {int(seeds):,} seeds (--sim-seeds)"]
    return []
