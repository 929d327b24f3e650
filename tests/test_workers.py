"""The workers of the tests: every test runs once and is reported, whatever happens to a worker."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.programs import run_program
from tests.workers import Schedule

LIMIT = 100.0


def run_pytest(folder: Path, *arguments: str) -> list[str]:
    """Run the modules of a folder on two workers, and return the lines that pytest printed."""
    done = run_program(
        *("pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "tests.workers"),
        *("--workers", "2", *arguments),
        timeout=LIMIT,
        cwd=folder,
        environ={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("seed", range(20))
def test_every_test_is_given_to_one_worker(seed: int) -> None:
    chance = random.Random(seed)
    workers = chance.randint(1, 8)
    numbers = iter(range(1000))
    modules = [
        [next(numbers) for _ in range(chance.randint(1, 30))] for _ in range(chance.randint(1, 20))
    ]
    schedule = Schedule(modules, workers)
    given: list[int] = []
    working = list(range(workers))
    while working:
        worker = chance.choice(working)
        test = schedule.next(worker)
        if test is None:
            working.remove(worker)
        elif chance.random() < 0.1:
            schedule.put_back(worker, test)
        else:
            given.append(test)
    assert sorted(given) == [test for module in modules for test in module]


def test_a_module_is_divided_only_when_no_other_is_left() -> None:
    schedule = Schedule([[1, 2, 3, 4], [5], [6]], workers=2)
    assert [schedule.next(0), schedule.next(1), schedule.next(1)] == [1, 5, 6]
    assert [schedule.next(1), schedule.next(1), schedule.next(0)] == [3, 4, 2]
    assert schedule.next(0) is None


def test_results_and_output_are_reported(tmp_path: Path) -> None:
    for name in "abc":
        module = f"def test_good(tmp_path): pass\ndef test_bad(): print('from {name}'); 1 / 0\n"
        (tmp_path / f"test_{name}.py").write_text(module)
    lines = run_pytest(tmp_path)
    assert "3 failed, 3 passed" in lines[-1]
    for name in "abc":
        assert f"PASSED test_{name}.py::test_good" in lines
        assert f"FAILED test_{name}.py::test_bad - ZeroDivisionError: division by zero" in lines
        assert lines.count(f"from {name}") == 1


def test_a_test_that_ends_its_worker_is_a_failure_and_the_others_run(tmp_path: Path) -> None:
    module = "import os\ndef test_1(): pass\ndef test_2(): os._exit(3)\n"
    (tmp_path / "test_ends.py").write_text(module + "def test_3(): pass\ndef test_4(): pass\n")
    lines = run_pytest(tmp_path)
    assert "1 failed, 3 passed" in lines[-1]
    reason = "the worker ended with code 3 in this test"
    assert f"FAILED test_ends.py::test_2 - {reason}" in lines


def test_no_test_begins_after_the_first_failure_if_so_wanted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_bad(): assert False\n")
    for name in "bcd":
        tests = "".join(f"def test_{n}(): time.sleep(0.01)\n" for n in range(500))
        (tmp_path / f"test_{name}.py").write_text(f"import time\n{tests}")
    lines = run_pytest(tmp_path, "-x")
    assert "stopping after 1 failures" in "\n".join(lines)
    assert sum(line.startswith("PASSED") for line in lines) < 1500


def test_the_stacks_of_a_test_that_takes_too_long_are_reported(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text("import time\ndef test_hangs(): time.sleep(1000)\n")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    lines = run_pytest(tmp_path, "-p", "pytest_timeout", "--timeout", "1")
    assert "1 failed, 1 passed" in lines[-1]
    assert "Timeout (>1.0s) from pytest-timeout" in "\n".join(lines)
