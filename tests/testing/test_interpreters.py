"""The undocumented parts of asyncio that the simulator uses.

Here with the interpreter of the tests and with the newest one that is installed; `make compat`
runs these tests with each of them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.compat import PYTHONS

ROOT = Path(__file__).parents[2]
GUARD = Path(__file__).with_name("asyncio_guard.py")


@functools.cache
def interpreter(which: str) -> str:
    """Return this interpreter, or the newest supported one: this, of PATH, or of pyenv."""
    if which == "this":
        return sys.executable
    return next(
        path
        for version in reversed(PYTHONS)
        for path in _candidates(version)
        if _version(path) == version
    )


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if (path := shutil.which(f"python{version}")) is not None:
        yield path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


@functools.cache
def _version(path: str) -> str | None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def guard(path: str, **environment: str) -> dict[str, list[int]]:
    done = subprocess.run(
        [path, "-W", "error", str(GUARD)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, list[int]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("which", ["this", "newest"])
def test_asyncio_has_the_internals_that_the_simulator_uses(which: str) -> None:
    path = interpreter(which)
    result = guard(path, PYTHONHASHSEED="1")
    assert ".".join(map(str, result["version"])) in PYTHONS
    assert guard(path, PYTHONHASHSEED="2") == result
    assert len(set(result["digests"])) == len(result["digests"])
