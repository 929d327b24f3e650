"""A real Milvus for tests: Milvus Lite in its own process, which can be killed and restarted."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.servers import free_port

from .handlers import eventually

__all__ = ["MilvusServer"]


class MilvusServer:
    """One server; a restart uses the same port and folder."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        """Start it; it may take a second or two until it listens."""
        assert self._process is None
        options = ["--data-dir", str(self._folder), "--host", "127.0.0.1", "--port", str(self.port)]
        with (self._folder.parent / f"{self._folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "milvus_lite", "server", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def listens(self) -> bool:
        """Whether its port is open."""
        assert self._process is not None
        assert self._process.poll() is None, "the server has ended by itself"
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> MilvusServer:
        self.start()
        try:
            eventually(self.listens, 180.0)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
