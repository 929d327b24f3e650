"""A real Mosquitto for tests, with its own ports and directory, on loopback."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from tests.postgres.certificates import Certificate
from tests.servers import free_port

__all__ = ["Mosquitto", "port_is_open"]

#: Mosquitto starts in some 10 ms; a loaded machine may take a thousand times that.
START_LIMIT = 30.0


class Mosquitto:
    """A broker with a TCP and a WebSocket listener, and with a certificate both over TLS as well.

    :param persistence: whether it writes its state to disk immediately; otherwise a killed broker
        loses everything.
    :param users: names with passwords; without them, anonymous clients may do everything.
    :param options: more lines for its configuration.
    """

    def __init__(
        self,
        binary: str,
        *options: str,
        persistence: bool = False,
        users: Mapping[str, str] | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self._binary = binary
        self._options = options
        self._persistence = persistence
        self._users = users
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="moored-mosquitto-"))
        schemes = ["mqtt", "ws"] + (["mqtts", "wss"] if certificate else [])
        #: The port of each scheme.
        self.ports: dict[str, int] = {}
        while len(self.ports) < len(schemes):
            port = free_port()
            if port not in self.ports.values():
                self.ports[schemes[len(self.ports)]] = port

    def url(self, scheme: str = "mqtt", user: str = "") -> str:
        """Return its URL; `user` is inserted before the host verbatim."""
        host = "localhost" if scheme in ("mqtts", "wss") else "127.0.0.1"
        return f"{scheme}://{user}{'@' if user else ''}{host}:{self.ports[scheme]}"

    @property
    def port(self) -> int:
        """The port of its TCP listener."""
        return self.ports["mqtt"]

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """The text of its log file."""
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    @property
    def database(self) -> Path:
        """The file of its persistent state; exists only with persistence."""
        return self.directory / "mosquitto.db"

    @property
    def version(self) -> tuple[int, ...]:
        """The version that its log reports."""
        found = re.search(r"mosquitto version (\d+)\.(\d+)\.(\d+)", self.log)
        assert found is not None
        return tuple(int(part) for part in found.groups())

    def start(self) -> None:
        """Start it, and return when all its ports accept connections."""
        path = self.directory / "mosquitto.conf"
        path.write_text("\n".join(self._configuration()) + "\n")
        command = [self._binary, "-c", str(path)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_LIMIT
        for port in self.ports.values():
            while not port_is_open(port):
                assert self._process.poll() is None, f"mosquitto ended: {self.log}"
                assert time.monotonic() < deadline, f"mosquitto does not listen: {self.log}"
                time.sleep(0.005)

    def _configuration(self) -> Iterable[str]:
        yield f"log_dest file {self.directory / 'log'}"
        yield "user root"  # keep the user: ignored unless started by root
        yield "log_type all"
        yield f"allow_anonymous {'false' if self._users else 'true'}"
        if self._users:
            yield f"password_file {self._passwords()}"
        if self._persistence:
            yield "persistence true"
            yield f"persistence_location {self.directory}/"
            yield "autosave_on_changes true"
            yield "autosave_interval 1"
        yield from self._options
        for scheme, port in self.ports.items():
            yield f"listener {port} 127.0.0.1"
            if scheme in ("ws", "wss"):
                yield "protocol websockets"
            if scheme in ("mqtts", "wss"):
                assert self._certificate is not None
                yield f"certfile {self._certificate.certificate}"
                yield f"keyfile {self._certificate.key}"

    def _passwords(self) -> Path:
        assert self._users is not None
        path = self.directory / "passwords"
        path.write_text("".join(f"{name}:{secret}\n" for name, secret in self._users.items()))
        subprocess.run(["mosquitto_passwd", "-U", str(path)], check=True, capture_output=True)
        return path

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Kill it, and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def port_is_open(port: int) -> bool:
    """Whether a loopback port accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
