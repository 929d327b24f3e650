"""Run other projects' own tests with psycopg_pool, and again with Moored's pools in its place.

Each checkout is copied, and installed with its test requirements and Moored into an environment of
its own. The tests that use a pool run against an embedded PostgreSQL, twice; the second time,
`moored.reservoir.psycopg_pool.install()` is called at the start of every Python. A test that passes
with psycopg_pool only is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moored.embedded import SyncEmbeddedPostgres

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moored" / "conformance"
SITE = ROOT / "tools" / "conformance_site"
POOLS = ("psycopg_pool", "moored")
#: One run takes minutes; a run that takes longer than this hangs.
LIMIT = 3600.0
PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-p", "conformance_hooks"),
    *("--timeout=300", "-q"),
)
SHOW = """
from psycopg_pool import AsyncConnectionPool, ConnectionPool
print(ConnectionPool.__module__, AsyncConnectionPool.__module__)
"""

Outcomes = Mapping[str, str]


@dataclass(frozen=True)
class Project:
    """How a project's tests are installed and run."""

    #: Where its tests run, in its checkout.
    folder: str
    #: Arguments of `uv pip install`, run there.
    install: tuple[str, ...]
    #: Arguments of Python.
    command: tuple[str, ...]
    #: The port of PostgreSQL that its tests expect; 0 if they read PGPORT.
    port: int = 0


PROJECTS = {
    "django": Project(
        "tests",
        ("-e", "..", "psycopg[binary]", "psycopg-pool", "jinja2", "tblib"),
        (
            *("runtests.py", "--settings=conformance_hooks", "--parallel=1", "--noinput"),
            *("backends", "transactions", "transaction_hooks", "servers", "select_for_update"),
            *("async", "db_utils", "dbshell", "get_or_create", "multiple_database", "handlers"),
            *("test_utils", "migrations"),
        ),
    ),
    "procrastinate": Project(
        ".",
        (
            *("-e", ".[django,sqlalchemy]", "--group=test", "--group=pg_implem"),
            *("sphinx", "pytest-timeout"),
        ),
        (
            *(*PYTEST, "tests/integration", "tests/unit/test_psycopg_connector.py"),
            *("tests/unit/test_sync_psycopg_connector.py", "tests/acceptance/test_async.py"),
            *("tests/acceptance/test_sync.py", "tests/acceptance/test_shell.py"),
            "tests/acceptance/test_nominal.py",
        ),
    ),
    "langgraph": Project(
        "libs/checkpoint-postgres",
        (
            *("-e", "../checkpoint", "-e", "../checkpoint-conformance", "-e", "."),
            *("--group=test", "pytest-timeout"),
        ),
        (*PYTEST, "tests"),
        port=5441,
    ),
}


class Failed(Exception):
    """A step that failed, with the end of its output."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; return its output, or raise Failed with the end of it."""
    with tempfile.TemporaryFile("w+") as output:
        status = _run(command, cwd, environment, output)
        output.seek(0)
        printed = output.read()
    if status:
        raise Failed(f"{' '.join(map(str, command))}\n{printed[-3000:]}")
    return printed


def _run(
    command: tuple[str | Path, ...], cwd: Path, environment: Mapping[str, str], output: IO[str]
) -> int:
    """Run a command to its end, and end the programs that it has left behind."""
    ours = ("MOORED_", "PYTHON", "VIRTUAL_ENV", "MAKEFLAGS", "PG")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**plain, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired as error:
            raise Failed(str(error)) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def differences(before: Outcomes, after: Outcomes) -> Iterator[tuple[str, str, str]]:
    """Yield each test whose outcome is another one, with both; "not run" where it has none."""
    for test in sorted({*before, *after}):
        outcomes = before.get(test, "not run"), after.get(test, "not run")
        if len(set(outcomes)) > 1:
            yield test, *outcomes


def read(lines: str) -> dict[str, str]:
    """Return each test's outcome: the worst of those that were written for it."""
    order = ("skipped", "passed", "failed")
    outcomes: dict[str, str] = {}
    for test, outcome in map(json.loads, lines.splitlines()):
        outcomes[test] = max(outcomes.get(test, outcome), outcome, key=order.index)
    return outcomes


def counted(outcomes: Outcomes) -> str:
    """Return how many tests had which outcome."""
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))


def prepare(project: Project, checkout: Path, work: Path, uv: str) -> tuple[Path, Path]:
    """Copy and install a checkout; return its environment's Python and where its tests run."""
    copy, python = work / "checkout", work / "env" / "bin" / "python"
    ignored = shutil.ignore_patterns(".git", ".venv", "node_modules", "__pycache__")
    shutil.copytree(checkout, copy, symlinks=True, ignore=ignored)
    folder = copy / project.folder
    run(uv, "venv", "-q", "--python", sys.executable, work / "env")
    install = (uv, "pip", "install", "-q", "--python", str(python), *project.install)
    # A copy without .git has no version for packages that read theirs from there.
    run(*install, cwd=folder, UV_DYNAMIC_VERSIONING_BYPASS="9999")
    return python, folder


def test(project: Project, python: Path, folder: Path, pool: str, log: Path) -> Outcomes:
    """Run the tests with one of the pools; return the outcomes."""
    with (
        tempfile.TemporaryDirectory() as home,
        SyncEmbeddedPostgres(port=project.port, password="postgres") as server,
        log.open("w") as output,
    ):
        written = Path(home) / "outcomes"
        written.touch()
        environment = {
            "PATH": f"{python.parent}:{server.bin_dir}:{os.environ['PATH']}",
            # Not installed, as Moored's own plugin of pytest has no part in this.
            "PYTHONPATH": f"{SITE}:{ROOT / 'src'}",
            "CONFORMANCE_POOL": pool,
            "CONFORMANCE_OUTCOMES": str(written),
            "PGHOST": server.host,
            "PGPORT": str(server.port),
            "PGUSER": server.user,
            "PGPASSWORD": server.password,
            "PGDATABASE": "postgres",
        }
        modules = run(python, "-c", SHOW, cwd=folder, **environment).split()
        if any(each.partition(".")[0] != pool for each in modules):
            raise Failed(f"the pools are those of {', '.join(modules)}, not of {pool}")
        _run((python, *project.command), folder, environment, output)
        return read(written.read_text())


def compare(name: str, checkout: Path, uv: str) -> bool:
    """Run a project's tests with both pools; return whether Moored's pass as many."""
    project = PROJECTS[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=CACHE) as work:
        python, folder = prepare(project, checkout, Path(work), uv)
        for pool in POOLS:
            log = CACHE / f"{name}-{pool}.log"
            found = test(project, python, folder, pool, log)
            print(f"{name} with {pool}: {counted(found)} ({log})", flush=True)
            if "passed" not in found.values():
                raise Failed(f"no test of {name} passes with {pool}: see {log}")
            outcomes.append(found)
    worse = False
    for each, before, after in differences(*outcomes):
        worse |= before == "passed"
        print(f"{name}: {each}: {before} with psycopg_pool, {after} with Moored", flush=True)
    return not worse


def mistake(given: Mapping[str, Path]) -> str:
    """Return what is wrong with the checkouts that are given, if anything is."""
    if not given:
        variables = " ".join(f"{name.upper()}=…" for name in PROJECTS)
        return f"give at least one checkout: make conformance {variables}"
    for name, checkout in given.items():
        if not (checkout / (folder := PROJECTS[name].folder)).is_dir():
            return f"{checkout} is not a checkout of {name}: there is no {checkout / folder}"
    return ""


def main() -> int:
    """Compare the pools in each checkout that is given; return 1 if Moored's fail a test."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in PROJECTS:
        parser.add_argument(f"--{name}", metavar="DIR", help=f"a checkout of {name}")
    arguments = vars(parser.parse_args())
    given = {name: Path(value).expanduser() for name, value in arguments.items() if value}
    if wrong := mistake(given):
        print(f"conformance: {wrong}", file=sys.stderr)
        return 2
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if (uv := shutil.which("uv", path=places)) is None:
        print("conformance: uv is needed: run it as `make conformance`", file=sys.stderr)
        return 2
    # A job in the background ignores it, and so would the programs of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        same = [compare(name, checkout, uv) for name, checkout in given.items()]
    except Failed as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
