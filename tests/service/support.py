"""A service in a process of its own, and helpers to query and stop it."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.programs import Program, run_program

__all__ = [
    "Running",
    "answers",
    "clean_environment",
    "gone",
    "moored",
    "own_stream",
    "running",
    "until",
]

#: Three times what a start with a new data directory, or a stop, may take on a busy machine.
LIMIT = 90.0


def until(condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Poll for an effect of another process that cannot be awaited."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.03)


def answers(url: str) -> bool:
    """Whether a request to a service, which may not listen yet, succeeds."""
    try:
        return httpx.get(url, timeout=LIMIT, trust_env=False, verify=False).is_success
    except httpx.TransportError:
        return False


_numbers = itertools.count(1)
_states = Path(tempfile.mkdtemp(prefix="moored-test-"))
# For the tokens that services make for themselves, instead of this user's directory.
os.environ["XDG_STATE_HOME"] = str(_states)


@atexit.register
def _remove_states(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # and not a worker that has ended before the others
        shutil.rmtree(_states, ignore_errors=True)


def own_stream() -> dict[str, str]:
    """The settings of a stream for one service: slots belong to the whole server."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    state = str(_states / name)
    return {
        "MOORED_STREAM_ID": name,
        "MOORED_STATE_DIR": state,
        "MOORED_POOL_SIZE": "2",
    }


def gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these processes runs."""
    _, alive = psutil.wait_procs(processes, timeout=LIMIT)
    assert alive == []


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without variables that configure the service."""
    ours = ("MOORED_", "DATABASE_URL", "NOTIFY_URL")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**kept, **more}


def moored(
    *arguments: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    own = own_stream() if "serve" in arguments and "--data-dir" not in arguments else {}
    environment = clean_environment(**own, **environ)
    return run_program("moored.cli", *arguments, timeout=LIMIT, cwd=cwd, environ=environment)


class Running:
    """One `moored serve` process; a thread reads its output."""

    def __init__(self, process: Program) -> None:
        self.process = process
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait for the first matching line of output, and return it."""

        def found() -> re.Match[str] | None:
            matches = (re.search(pattern, line) for line in self.lines[after:])
            return next((match for match in matches if match), None)

        with self._said:
            self._said.wait_for(lambda: found() is not None, timeout=LIMIT)
            match = found()
        assert match is not None, f"not said: {pattern}; but: {self.lines}"
        return match

    @property
    def link(self) -> str:
        """The link to the page, from its output; with a token, unless one is configured."""
        return self.wait_for(r"(http://\S+)")[1]

    @property
    def url(self) -> str:
        """The URL of the service."""
        return self.link.partition("/?")[0]

    @property
    def bearer(self) -> dict[str, str]:
        """The header with the token of the link, if it has one."""
        _, _, token = self.link.partition("/?token=")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request, with the token of the link."""
        # Without `verify=False`, each request would read the authorities for 50 ms.
        options = {"timeout": LIMIT, "trust_env": False, "verify": False, **options}
        options["headers"] = {**self.bearer, **options.get("headers", {})}
        return httpx.get(self.url + path, **options)

    def health(self) -> tuple[int, str]:
        """Return the HTTP code and the state of `/v1/health`."""
        answer = self.get("/v1/health")
        return answer.status_code, answer.json()["status"]

    def wait_active(self) -> None:
        """Wait until the service is ready."""
        until(lambda: self.health() == (200, "active"), f"active; it said {self.lines}")

    def family(self) -> list[psutil.Process]:
        """Return its process and all descendants, including the guard and PostgreSQL."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def postgres(self) -> psutil.Process:
        """Return the pid of the first process of its embedded server."""
        return next(p for p in self.family() if p.name() == "postgres")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and for the end of its output."""
        code = self.process.wait(LIMIT)
        for reader in self._readers:
            reader.join(LIMIT)
        return code


@contextmanager
def running(
    *arguments: str,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    descriptors: int | None = None,
) -> Iterator[Running]:
    """Start `moored serve` on a free port, and end it with the block.

    Without a data directory of its own it has a stream of its own. `descriptors` is the limit of
    its open descriptors.
    """
    own = {"MOORED_POOL_SIZE": "2"} if "--data-dir" in arguments else own_stream()
    process = Program(
        *("moored.cli", "serve", "--port", "0", *arguments),
        stderr=True,
        cwd=cwd,
        environ=clean_environment(**{**own, **(environ or {})}),
        descriptors=descriptors,
    )
    with process:
        service = Running(process)
        try:
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(LIMIT)
            finally:
                process.kill()
                service.wait()
