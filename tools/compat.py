"""Build the sdist and the wheel, check them, and try them with each Python that is found.

Each Python gets clean environments, outside of the checkout: one per extra, and one with all
extras, in the newest and in the lowest versions that pyproject.toml allows. There a smoke test
runs, and tests of the unpacked sdist: the pure ones, and a few that start programs, among them an
installed PostgreSQL. Only wheels are installed, nothing is compiled. As root on a machine with
apt, Pythons that are missing come from Debian's testing suite, in a chroot below the cache folder,
where the installed PostgreSQL is that of the stable suite.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moored" / "compat"
#: Also visible in the chroot, at the same path.
WORK = CACHE / "work"
UV = WORK / "uv"
CHROOT = CACHE / "debian"
SUITE = "forky"
#: The PostgreSQL of the chroot, and its suite: newer than the one of `make servers` on Debian 12.
POSTGRES, POSTGRES_SUITE = "17", "trixie"
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
#: What the pure tests import beyond the package and its extras.
TEST_TOOLS = (
    *("hypothesis", "mqtt5", "psutil", "pytest", "pytest-asyncio", "pytest-randomly"),
    *("pytest-timeout", "uvloop"),
)
#: What starts programs, and differs with the interpreter, the driver or the installed PostgreSQL.
OTHER_TESTS = (
    *("tests/kernel/test_eager_tasks.py", "tests/kernel/test_loop_thread.py"),
    *("tests/testing/test_interpreters.py", "tests/reservoir/test_cancellation.py"),
    "tests/postgres/test_scenarios_versions.py",
)
#: A server that runs in the environment is the best smoke test: it connects, queries and stops.
EMBEDDED = """
from moored.embedded import BinariesNotFound, SyncEmbeddedPostgres
from moored.reservoir import ConnectionPool
try:
    with SyncEmbeddedPostgres() as server, ConnectionPool(server.url, min_size=1) as pool:
        with pool.connection() as conn:
            version, = conn.execute("show server_version").fetchone()
    print("PostgreSQL", version)
except BinariesNotFound as error:
    print(error)
"""
#: What works with the base install, and with each extra alone.
SMOKE = {
    "": """
import sqlite3
import moored.broker, moored.embedded, moored.leases, moored.postgres, moored.sessions
import moored.testing
from moored.reservoir import ConnectionPool
options = {"database": ":memory:", "check_same_thread": False}
with ConnectionPool(connect=sqlite3.connect, kwargs=options) as pool:
    with pool.connection() as conn:
        assert conn.execute("select 1").fetchone() == (1,)
""",
    "service": """
import asyncio, moored, moored.cli, moored.service
app = moored.App("smoke")
@app.component()
async def part(ctx):
    await asyncio.sleep(3600)
async def main():
    async with app:
        pass
asyncio.run(main())
""",
    "embedded": EMBEDDED,
    "redis": "import moored.broker.redis, moored.leases.redis",
    "dynamodb": "import moored.leases.dynamodb",
    "sqlalchemy": "import moored.reservoir.sqlalchemy",
    "asyncpg": "import asyncpg, moored.reservoir",
    "aws": "from moored.reservoir.aws import RdsTokens; RdsTokens('h', user='u', region='r')",
    "grpc": "import moored.rpc",
    "milvus": "import moored.rpc.milvus",
    "mqtt": "from moored.sessions import WebSocket; WebSocket('ws://x')",
    "encryption": "from moored.sessions.storage._seal import _aes_gcm; _aes_gcm()",
    "jwt": "from moored.broker import Jwt; Jwt('k' * 32)",
    "client": "import moored.broker.client",
    "otel": "import moored.otel",
}


class Failed(Exception):
    """A step that failed, with the end of its output."""


@dataclass(frozen=True)
class Python:
    """An interpreter, and what comes before its commands."""

    version: str
    path: str
    prefix: tuple[str, ...] = ()

    def run(self, *command: str | Path, cwd: Path = WORK) -> str:
        """Run a command beside the interpreter."""
        return run("env", "-C", cwd, *command, prefix=self.prefix)


def run(*command: str | Path, cwd: Path = ROOT, prefix: Sequence[str] = ()) -> str:
    """Run a command and return its output, or raise Failed with the end of it."""
    shared = {"UV_CACHE_DIR": str(WORK / "uv-cache"), "UV_PYTHON_DOWNLOADS": "never"}
    environment = {**os.environ, **shared, "MOORED_SCALE": "0.01", "PYTHONSAFEPATH": ""}
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS"):
        environment.pop(name, None)
    done = subprocess.run(
        [*prefix, *(str(each) for each in command)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it."""
    dist = WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(UV, "build", "-q", "--out-dir", dist, ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def mistakes(sdist: Sequence[str], wheel: Sequence[str], tracked: Sequence[str]) -> Iterator[str]:
    """Yield what the archives lack, or have without need; names are relative to their root."""
    for name in sorted({each for each in tracked if not each.startswith(".")} - set(sdist)):
        yield f"the sdist lacks {name}"
    source = {each.removeprefix("src/") for each in tracked if each.startswith("src/")}
    for name in sorted(source - set(wheel)):
        yield f"the wheel lacks {name}"
    if "moored/py.typed" not in wheel:
        yield "the wheel lacks moored/py.typed"
    if not any(each.endswith(".dist-info/licenses/LICENSE") for each in wheel):
        yield "the wheel lacks its licence"
    for name in sorted(each for each in wheel if each not in source and ".dist-info/" not in each):
        yield f"the wheel has {name}, which is not part of the package"


def check(sdist: Path, wheel: Path) -> None:
    """Check the contents and the metadata of both archives; unpack the sdist."""
    with tarfile.open(sdist) as archive:
        names = [each.partition("/")[2] for each in archive.getnames()]
        shutil.rmtree(WORK / "sdist", ignore_errors=True)
        archive.extractall(WORK / "sdist", filter="data")
    with zipfile.ZipFile(wheel) as contents:
        inside = contents.namelist()
        (path,) = (each for each in inside if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(contents.read(path).decode())
    wrong = list(mistakes(names, inside, run("git", "ls-files").split("\n")[:-1]))
    if metadata["License-Expression"] != "Apache-2.0":
        wrong.append("the metadata name no licence")
    if wrong:
        raise Failed("\n".join(wrong))
    run(UV, "tool", "run", "twine", "check", "--strict", sdist, wheel)


def find() -> Iterator[Python]:
    """Yield one interpreter for each version: from PATH, pyenv, uv, or the chroot."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    uv = Path(run(UV, "python", "dir").strip())
    for version in PYTHONS:
        places: list[str | Path | None] = [shutil.which(f"python{version}")]
        places += [*pyenv.glob(f"{version}.*/bin/python"), *uv.glob(f"*-{version}.*/bin/python")]
        for place in filter(None, places):
            if answer := _version(str(place)):
                yield Python(answer, str(place))
                break
        else:
            if (CHROOT / f"usr/bin/python{version}").exists():
                prefix = _in_chroot()
                path = f"/usr/bin/python{version}"
                yield Python(_version(path, prefix) or version, path, prefix)


def _version(path: str, prefix: Sequence[str] = ()) -> str:
    try:
        code = "import platform; print(platform.python_version())"
        return run(path, "-c", code, prefix=prefix).strip()
    except (Failed, OSError):
        return ""


def make_chroot() -> None:
    """Install the newest Pythons and a PostgreSQL below the cache folder, and nothing else."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    if not (CHROOT / "made").exists():
        _install_debian()
    if not (CHROOT / f"usr/lib/postgresql/{POSTGRES}").exists():
        _install_postgres()


def _install_debian() -> None:
    print(f"compat: installing Debian {SUITE} with its Pythons in {CHROOT}", flush=True)
    shutil.rmtree(CHROOT, ignore_errors=True)
    tool = CACHE / "debootstrap"
    run("apt-get", "download", "-qq", "debootstrap", cwd=CACHE)
    (package,) = CACHE.glob("debootstrap_*.deb")
    run("dpkg", "-x", package, tool)
    package.unlink()
    share = tool / "usr/share/debootstrap"
    packages = ["ca-certificates", *(f"python{each}" for each in PYTHONS[2:])]
    run(
        *("env", f"DEBOOTSTRAP_DIR={share}", tool / "usr/sbin/debootstrap", "--variant=minbase"),
        *(f"--include={','.join(packages)}", SUITE, CHROOT, _mirror(), share / "scripts/sid"),
    )
    (CHROOT / "made").touch()


def _mirror() -> str:
    """Return the mirror of Debian that this machine uses."""
    command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Origin: Debian"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pairs = [line.split() for line in found.splitlines()]
    # Updates and security have suites of their own.
    return next(uri for suite, uri in pairs if "-" not in suite)


def _install_postgres() -> None:
    print(f"compat: installing PostgreSQL {POSTGRES} in {CHROOT}", flush=True)
    etc = CHROOT / "etc"
    source = f"deb {_mirror()} {POSTGRES_SUITE} main\n"
    (etc / "apt/sources.list.d/postgres.list").write_text(source)
    (etc / "postgresql-common").mkdir(exist_ok=True)
    (etc / "postgresql-common/createcluster.conf").write_text("create_main_cluster = false\n")
    # Debootstrap, too, takes the lists of a mirror that are older than they should be.
    apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq")
    run(*apt, "-o", "Acquire::Check-Valid-Until=false", "update", prefix=_in_chroot())
    packages = ("--no-install-recommends", f"postgresql-{POSTGRES}")
    run(*apt, "install", "-y", *packages, prefix=_in_chroot())
    run(*apt, "clean", prefix=_in_chroot())


def _in_chroot() -> tuple[str, ...]:
    """Return the start of a command that runs in the chroot, with mounts that only it sees."""
    work = f"{CHROOT}{WORK}"
    Path(work).mkdir(parents=True, exist_ok=True)
    mounts = [f"mount --bind {WORK} {work}", f"mount -t proc proc {CHROOT}/proc"]
    mounts += [f"mount --bind {each} {CHROOT}{each}" for each in ("/dev", "/etc/ssl/certs")]
    script = " && ".join([*mounts, f'exec chroot {CHROOT} "$@"'])
    return ("unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh")


def try_with(
    python: Python, wheel: Path, extras: Sequence[str], tests: bool
) -> Iterator[tuple[str, str | Failed]]:
    """Yield each step's name, and what it printed or why it failed."""
    everything = f"moored[all] @ file://{wheel}"
    for resolution in ("highest", "lowest-direct"):
        name = f"all extras, {'newest' if resolution == 'highest' else 'lowest'} versions"
        try:
            env = _environment(python, everything, resolution)
            yield name, "".join(python.run(env, "-I", "-c", code) for code in SMOKE.values())
            if tests:
                _install(python, env, *TEST_TOOLS)
        except Failed as error:
            yield name, error
            continue
        for kind in ("pure", "other") if tests else ():
            yield f"{kind} tests, {name}", _tests(python, env, kind)
    for extra in ("", *extras):
        name = f"extra {extra} alone" if extra else "no extra"
        try:
            suffix = f"[{extra}]" if extra else ""
            env = _environment(python, f"moored{suffix} @ file://{wheel}", "highest")
            yield name, python.run(env, "-I", "-c", SMOKE[extra])
        except Failed as error:
            yield name, error


def _environment(python: Python, package: str, resolution: str) -> Path:
    env = WORK / "env"
    shutil.rmtree(env, ignore_errors=True)
    python.run(UV, "venv", "-q", "--python", python.path, env)
    direct = requirements() if resolution == "lowest-direct" else ()
    _install(python, env / "bin/python", package, *direct, f"--resolution={resolution}")
    return env / "bin/python"


def _install(python: Python, env: Path, *what: str) -> None:
    python.run(UV, "pip", "install", "-q", "--only-binary=:all:", "--python", env, *what)


def _tests(python: Python, env: Path, kind: str) -> str | Failed:
    """Run the pure tests, or the other ones; return their counts, or what failed."""
    (root,) = (WORK / "sdist").iterdir()
    options = ["-q", "-p", "no:cacheprovider", "--workers", "2"]
    # Python 3.15 counts references in another way than Hypothesis expects.
    options += ["-W", "ignore:It looks like `register_random`"]
    # The lowest version of Starlette calls it, which Python 3.14 deprecates.
    options += ["-W", "ignore:'asyncio.iscoroutinefunction' is deprecated:DeprecationWarning"]
    # The lowest version of botocore calls it, which Python 3.12 deprecates.
    options += ["-W", "ignore:datetime.datetime.utcnow:DeprecationWarning"]
    if seed := os.environ.get("MOORED_SEED"):
        options += [f"--randomly-seed={seed}", f"--hypothesis-seed={seed}"]
    if kind == "pure":
        options += ["-m", "pure and not soak"]
        files = [str(path.relative_to(root)) for path in sorted(root.glob("tests/**/test_*.py"))]
        options += [each for each in files if "pytest.mark.pure" in (root / each).read_text()]
    else:
        options += ["-m", "not soak", *OTHER_TESTS]
    try:
        printed = python.run(env, "-m", "pytest", *options, cwd=root)
    except Failed as error:
        return error
    return next(line for line in reversed(printed.splitlines()) if " passed" in line)


def project() -> dict[str, Any]:
    """Return the metadata of the package."""
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return metadata


def requirements() -> list[str]:
    """Return what pyproject.toml requires: only then its lower bounds are the direct ones of uv."""
    groups = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return [each for group in groups for each in group if not each.startswith("moored[")]


def main() -> int:
    """Build, check, try; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="only these, for example 3.12 (all found)")
    parser.add_argument("--no-tests", action="store_true", help="smoke tests only")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if (
        uv := shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ) is None:
        print("compat: uv is needed: run it as `make compat`", file=sys.stderr)
        return 2
    shutil.copy2(uv, UV)
    lock = (WORK / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would share the environment
    extras = [each for each in project()["optional-dependencies"] if each != "all"]
    try:
        sdist, wheel = build()
        check(sdist, wheel)
        make_chroot()
    except Failed as error:
        print(f"compat: {error}", file=sys.stderr)
        return 1
    print(f"compat: {sdist.name} and {wheel.name} are complete", flush=True)
    failed = 0
    found = {each.version.rpartition(".")[0]: each for each in find()}
    for version in arguments.versions or PYTHONS:
        if version not in found:
            print(f"Python {version}: not found, not tried", flush=True)
            continue
        python = found[version]
        for step, outcome in try_with(python, wheel, extras, not arguments.no_tests):
            if isinstance(outcome, Failed):
                failed += 1
                print(outcome, file=sys.stderr, flush=True)
                outcome = "FAILED"
            print(f"Python {python.version}, {step}:", outcome.strip() or "ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
