"""The options of an embedded server, and the command lines and settings that follow from them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from ._binaries import Binaries, minimal_environment
from ._errors import EmbeddedError

__all__ = ["HOST", "KILL_TIMEOUT", "ServerOptions", "environment"]

#: The address that a server listens on: it is for this machine only.
HOST = "127.0.0.1"
#: Seconds for an immediate shutdown, which the next start recovers from; then SIGKILL follows.
KILL_TIMEOUT = 10.0

_LONGEST_SOCKET = 107
_UNIX_PORT = 5432

# These go on the command line, so that a changed configuration cannot open the server to others.
_OURS = {
    "listen_addresses": "socket_dir",
    "port": "port",
    "unix_socket_directories": "socket_dir",
    "data_directory": "data_dir",
}
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of an embedded server; raises one `EmbeddedError` with all mistakes."""

    version: int | None
    bin_dir: Path | None
    port: int
    socket_dir: Path | None
    database: str
    user: str
    password: str | None
    options: Mapping[str, str]
    start_timeout: float
    #: Seconds for a fast shutdown: transactions are rolled back, and the data are written out.
    stop_timeout: float
    #: Whether the data are removed when the server is stopped.
    temporary: bool

    def __post_init__(self) -> None:
        if mistakes := self._mistakes():
            raise EmbeddedError("; ".join(mistakes))

    def _mistakes(self) -> list[str]:
        checks = {
            f"port={self.port} is not between 0 and 65535": 0 <= self.port < 65536,
            f"start_timeout={self.start_timeout} is not positive": self.start_timeout > 0,
            f"stop_timeout={self.stop_timeout} is negative": self.stop_timeout >= 0,
            "version and bin_dir are both given, but the programs in bin_dir have a fixed version: "
            "leave one out": self.version is None or self.bin_dir is None,
            "database is empty": bool(self.database),
            "user is empty": bool(self.user),
            f"user={self.user!r} contains one of \"'$\\, which initdb does not support": (
                not set(self.user) & set("\"'$\\")
            ),
            "password is empty": self.password != "",
            f"socket_dir={self.socket_dir} is too long: the path of its socket may have at most "
            f"{_LONGEST_SOCKET} bytes": len(self._socket_path()) <= _LONGEST_SOCKET,
        }
        return [text for text, right in checks.items() if not right] + self._option_mistakes()

    def _option_mistakes(self) -> list[str]:
        mistakes = []
        for name, value in self.options.items():
            if name in _OURS:
                mistakes.append(f"options may not set {name!r}: use {_OURS[name]}")
            elif not _NAME.fullmatch(name) or "\n" in str(value):
                mistakes.append(f"the option {name!r}={value!r} is not a PostgreSQL setting")
        return mistakes

    def _socket_path(self) -> bytes:
        return os.fsencode(self.socket_dir / f".s.PGSQL.{self.port}") if self.socket_dir else b""

    @property
    def first_port(self) -> int:
        """The port of the first start; 0 for a free one. A Unix socket has it only in its name."""
        return self.port or (_UNIX_PORT if self.socket_dir else 0)

    def where(self, port: int) -> str:
        """Return the address that the server listens on, for messages."""
        return f"{self.socket_dir or HOST}:{port}"

    def url(self, port: int, password: str, database: str | None = None) -> str:
        """Return the URL of a database of the server."""
        login = f"{quote(self.user, safe='')}:{quote(password, safe='')}"
        name = quote(database or self.database, safe="")
        if self.socket_dir is not None:
            where = urlencode({"host": str(self.socket_dir), "port": port})
            return f"postgresql://{login}@/{name}?{where}"
        return f"postgresql://{login}@{HOST}:{port}/{name}"

    def postgres(
        self, binaries: Binaries, data: str, port: int, socket_dir: str | None
    ) -> list[str]:
        """Return the command that runs the server."""
        reached = {
            "port": str(port),
            "listen_addresses": "" if socket_dir else HOST,
            "unix_socket_directories": socket_dir or "",
        }
        settings = [part for name in reached for part in ("-c", f"{name}={reached[name]}")]
        return [str(binaries.program("postgres")), "-D", data, *settings]

    def initdb(self, binaries: Binaries, data: str) -> list[str]:
        """Return the command that creates the data; the password is in a file beside them."""
        # The same sort order on every machine, and character classes beyond ASCII.
        locale = "C.UTF-8" if sys.platform == "linux" else "C"
        command = [
            str(binaries.program("initdb")),
            f"--pgdata={data}",
            f"--username={self.user}",
            f"--pwfile={data}/../password",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            f"--locale={locale}",
            "--lc-messages=C",
        ]
        if not self.durable:
            command.append("--no-sync")
        if self.temporary and binaries.major >= 16:
            # Iterations protect weak passwords. A random one needs none, and tests that connect a
            # thousand times save five seconds.
            command.append("--set=scram_iterations=1")
        return command

    @property
    def durable(self) -> bool:
        """Whether the data must survive a crash of the machine."""
        return not self.temporary and self.options.get("fsync") != "off"

    def settings(self) -> str:
        """Return the text of moored.conf: the defaults of an embedded server, then the options."""
        chosen = {
            "cluster_name": "moored",
            "wal_level": "logical",
            "max_wal_senders": "20",
            "max_replication_slots": "20",
            # Temporary data need not survive a crash of the machine, and a killed server must not
            # leave files in /dev/shm.
            **({"fsync": "off", "dynamic_shared_memory_type": "mmap"} if self.temporary else {}),
            **self.options,
        }
        head = "# Written at each start: change it with `options`, or use ALTER SYSTEM.\n"
        return head + "".join(f"{name} = {_quoted(str(chosen[name]))}\n" for name in chosen)


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def environment(binaries: Binaries) -> dict[str, str]:
    """Return the environment of the server."""
    moved = {"LD_LIBRARY_PATH": str(binaries.prefix / "lib")} if binaries.moved else {}
    return {**minimal_environment(), **moved}
