"""Run every example unchanged, and compare its output with the one in its docstring.

The docstring has the output under "Expected output:", indented. A line may have `…` where the
output differs from run to run.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from tests.programs import run_program

from moored.testing import scaled

ROOT = Path(__file__).parent.parent
#: Examples that need a server and run until stopped, with the test that runs each.
RUN_ELSEWHERE = {
    "mqtt_bot": "tests/sessions/test_docs.py",
    "orders_service": "tests/app/test_orders_service.py",
}
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("[a-z]*.py") if path.stem not in RUN_ELSEWHERE
)
SECONDS = 100


def expected(example: Path) -> list[str]:
    """Return the expected lines of an example."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    _, _, promised = docstring.partition("Expected output:\n")
    lines = [line.removeprefix("    ") for line in promised.strip("\n").splitlines()]
    assert lines, f"the docstring of {example.name} must have its 'Expected output:'"
    return lines


def pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split("…"))


def test_every_example_is_run_by_a_test() -> None:
    assert EXAMPLES
    assert all(stem in (ROOT / place).read_text() for stem, place in RUN_ELSEWHERE.items())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_its_expected_output(example: Path) -> None:
    seeds = scaled(2000, least=100)
    promised = [line.replace("2,000", f"{seeds:,}") for line in expected(example)]
    # Without MOORED_SEED, so that simulations run their default schedules.
    environ = {name: value for name, value in os.environ.items() if name != "MOORED_SEED"}
    environ["MOORED_SIM_SEEDS"] = str(seeds)
    done = run_program(str(example), timeout=SECONDS, cwd=ROOT, environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.rstrip("\n").splitlines()
    assert len(printed) == len(promised), done.stdout
    for line, promise in zip(printed, promised, strict=True):
        assert re.fullmatch(pattern(promise), line), f"promised {promise!r}, printed {line!r}"
