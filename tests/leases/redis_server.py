"""A real Redis for tests: its own port and directory, on loopback, ended by its own number."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.servers import free_port

__all__ = ["RedisServer"]

#: Redis starts in some 20 ms; a loaded machine may take a hundred times that.
START_LIMIT = 30.0


class RedisServer:
    """A server that keeps what it acknowledged, also when it is killed."""

    def __init__(self, binary: str, *options: str) -> None:
        self._binary = binary
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="moored-redis-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [
            *(self._binary, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.directory), "--appendonly", "yes", "--save", ""),
            # By default, it may answer before it has written, while another fsync is running.
            *("--appendfsync", "no"),
            *("--unixsocket", str(self.socket), "--logfile", str(self.directory / "log")),
            *self.options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._wait_until_it_answers()

    @property
    def socket(self) -> Path:
        return self.directory / "redis.sock"

    def kill(self) -> None:
        """End it by SIGKILL, and return when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, *command: str | int) -> object:
        """One command, on a connection of its own."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(port=self.port, decode_responses=True, retry=once) as client:
            return client.execute_command(*command)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                self.run("PING")
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                assert self._process is not None
                log = (self.directory / "log").read_text() if self._process.poll() else ""
                assert self._process.poll() is None, f"redis-server ended: {log}"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.005)
            else:
                return
