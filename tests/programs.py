"""Start programs of the tests by forking a process that has already imported what they import.

A new interpreter with its imports takes 0.2 to 1.5 s of CPU time, and the tests start hundreds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.initdb_once import initdb_once

__all__ = ["Program", "run_program", "share_imports"]

#: Modules that the programs import. None of them starts a thread or opens a connection.
_PRELOAD = [
    "grpc",
    "grpc_health.v1.health",
    "grpc_health.v1.health_pb2_grpc",
    "moored.cli._app",
    "moored.leases.postgres",
    "moored.leases.redis",
    "moored.postgres",
    "moored.reservoir.psycopg",
    "moored.rpc",
    "moored.sessions",
    "moored.sessions.mqtt",
    "moored.testing",
    "tests.initdb_once",
    "typer._adapters",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.websockets.auto",
]

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(_PRELOAD)


def share_imports() -> None:
    """Let the processes that this one forks start their programs from one process, not from eight.

    Each of them would start its own, because it cannot wait for one that is not its child.
    """
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None


class Program:
    """A running module, like `python -m`, or script, with pipes as its standard streams.

    Its standard error is appended to the file `log`, or else is that of the tests, unless
    `stderr=True` gives it a pipe. `descriptors` is the limit of its open descriptors.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path | None = None,
        stderr: bool = False,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        descriptors: int | None = None,
    ) -> None:
        self.args = (module, *arguments)
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        self.stdin = os.fdopen(our_input, "w")
        self.stdout = os.fdopen(our_output)
        pipes = {0: Connection(their_input, writable=False), 1: Connection(their_output)}
        self._ours = [self.stdin, self.stdout]
        if stderr:
            our_errors, their_errors = os.pipe()
            self.stderr = os.fdopen(our_errors)
            pipes[2] = Connection(their_errors)
            self._ours.append(self.stderr)
        else:  # the process that is forked may have that of another worker
            pipes[2] = Connection(os.dup(2))
        self._process = _forks.Process(
            target=_main,
            args=(module, arguments, pipes, log, cwd, environ, descriptors),
            name=module,
            daemon=True,
        )
        self._process.start()
        for pipe in pipes.values():
            pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends, and return its exit code."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"{self._process.name} has not ended within {timeout} s"
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._ours:
            stream.close()
        self.wait()


def run_program(
    module: str,
    *arguments: str,
    timeout: float,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module or a script to its end, and return what it printed."""
    with (
        Program(module, *arguments, stderr=True, cwd=cwd, environ=environ) as program,
        ThreadPoolExecutor(2) as readers,
    ):
        program.stdin.close()
        printed = [readers.submit(stream.read) for stream in (program.stdout, program.stderr)]
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(program.args, code, *(each.result() for each in printed))


def _main(
    module: str,
    arguments: tuple[str, ...],
    pipes: dict[int, Connection],
    log: Path | None,
    cwd: Path | None,
    environ: Mapping[str, str] | None,
    descriptors: int | None,
) -> None:
    for number, pipe in pipes.items():
        os.dup2(pipe.fileno(), number)
        pipe.close()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    # A collection would copy the memory of everything that was imported.
    gc.freeze()
    warnings.simplefilter("error")
    multiprocessing.current_process().daemon = False  # it may have children of its own
    with initdb_once():
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        if cwd is not None:
            os.chdir(cwd)
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        sys.argv = [module, *arguments]
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(module, run_name="__main__", alter_sys=True)
