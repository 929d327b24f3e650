"""The undocumented parts of asyncio that the simulator uses, on every supported Python."""

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

SUPPORTED = ["3.11", "3.12", "3.13", "3.14"]
#: All of them, the older ones in `make soak`.
NEWEST = [*(pytest.param(each, marks=pytest.mark.soak) for each in SUPPORTED[:2]), *SUPPORTED[2:]]
ROOT = Path(__file__).parents[2]
GUARD = Path(__file__).with_name("asyncio_guard.py")


@functools.cache
def find(version: str) -> str | None:
    """Return an interpreter of this version from PATH or pyenv, or None."""
    return next((path for path in _candidates(version) if _version(path) == version), None)


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if (path := shutil.which(f"python{version}")) is not None:
        yield path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


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


@pytest.mark.parametrize("version", NEWEST)
def test_asyncio_has_the_internals_that_the_simulator_uses(version: str) -> None:
    path = find(version)
    if path is None:
        pytest.skip(f"Python {version} is not installed")
    result = guard(path, PYTHONHASHSEED="1")
    assert result["version"] == [int(part) for part in version.split(".")]
    assert guard(path, PYTHONHASHSEED="2") == result
    assert len(set(result["digests"])) == len(result["digests"])


def test_this_interpreter_is_supported() -> None:
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in SUPPORTED
