"""Start programs of the tests by forking a process that has already imported what they import.

A new interpreter with its imports takes 0.2 to 0.5 s of CPU time, and the tests start hundreds.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

__all__ = ["Program"]

#: Modules that the programs import. None of them starts a thread or opens a connection.
_PRELOAD = [
    "grpc",
    "grpc_health.v1.health",
    "grpc_health.v1.health_pb2_grpc",
    "moored.leases.postgres",
    "moored.leases.redis",
    "moored.postgres",
    "moored.sessions",
    "moored.sessions.mqtt",
]

_forks = multiprocessing.get_context("forkserver")


class Program:
    """A running module, like `python -m`, with pipes as its standard input and output.

    Its standard error is appended to the file `log`, or else is that of the tests.
    """

    def __init__(self, module: str, *arguments: str, log: Path | None = None) -> None:
        _forks.set_forkserver_preload(_PRELOAD)
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        pipes = Connection(their_input, writable=False), Connection(their_output, readable=False)
        self.stdin = os.fdopen(our_input, "w")
        self.stdout = os.fdopen(our_output)
        self._process = _forks.Process(
            target=_main, args=(module, arguments, log, *pipes), name=module, daemon=True
        )
        self._process.start()
        for pipe in pipes:
            pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

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
        self.stdin.close()
        self.stdout.close()
        self.wait()


def _main(
    module: str,
    arguments: tuple[str, ...],
    log: Path | None,
    stdin: Connection,
    stdout: Connection,
) -> None:
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    stdin.close()
    stdout.close()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
