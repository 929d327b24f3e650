"""A real ejabberd as an MQTT broker for tests: its own port and directory, on loopback.

It runs as one Erlang node without distribution: no name, no epmd, no process that outlives it.
(`ejabberdctl` would start epmd, and run it as another user.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.servers import free_port
from tests.sessions.mosquitto import port_is_open

__all__ = ["Ejabberd"]

#: It starts in some 2 s; on a machine with many busy processes, it takes a hundred times that.
START_LIMIT = 240.0
#: Any user and password are accepted; only topics below `open` may be used.
CONFIGURATION = """
hosts: [localhost]
loglevel: warning
auth_method: [anonymous]
anonymous_protocol: login_anon
allow_multiple_connections: true
listen:
  - {{port: {port}, ip: "127.0.0.1", module: mod_mqtt, backlog: 100}}
  - {{port: {web}, ip: "127.0.0.1", module: ejabberd_http, request_handlers: {{/mqtt: mod_mqtt}}}}
modules:
  mod_mqtt:
    access_publish: {{"open/#": all}}
    access_subscribe: {{"open/#": all}}
"""


class Ejabberd:
    """A broker with a TCP and a WebSocket listener."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="moored-ejabberd-"))
        self.port = free_port()
        self.web = free_port()
        while self.web == self.port:
            self.web = free_port()

    def url(self, user: str, scheme: str = "mqtt") -> str:
        """Return its URL for an account; its user names have a host, as in XMPP."""
        port = self.port if scheme == "mqtt" else self.web
        return f"{scheme}://{user}%40localhost:any@127.0.0.1:{port}"

    @property
    def log(self) -> str:
        """The output of its process."""
        path = self.directory / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Start it, and return when its ports accept connections."""
        configuration = self.directory / "ejabberd.yml"
        configuration.write_text(CONFIGURATION.format(port=self.port, web=self.web))
        spool = self.directory / "spool"
        spool.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "HOME": str(self.directory),
            "EJABBERD_CONFIG_PATH": str(configuration),
            "EJABBERD_LOG_PATH": str(self.directory / "ejabberd.log"),
            "ERL_CRASH_DUMP": str(self.directory / "crash"),
            "ERL_LIBS": str(_libraries()),
            "SPOOL_DIR": str(spool),
        }
        command = ["erl", "-noinput", "-start_epmd", "false", "+S", "1"]
        command += ["-mnesia", "dir", f'"{spool}"', "-s", "ejabberd"]
        with (self.directory / "out").open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, cwd=self.directory, stdout=out, stderr=out
            )
        deadline = time.monotonic() + START_LIMIT
        for port in (self.port, self.web):
            while not port_is_open(port):
                assert self._process.poll() is None, f"ejabberd ended: {self.log}"
                assert time.monotonic() < deadline, f"ejabberd does not listen: {self.log}"
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _libraries() -> Path:
    """Return the directory of ejabberd's own libraries, as Debian installs them."""
    [found, *_] = sorted(Path("/usr/lib").glob("*/ejabberd-*"))
    return found.parent
