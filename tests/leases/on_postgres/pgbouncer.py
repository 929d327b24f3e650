"""A real PgBouncer in transaction mode, in front of a test's database."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict
from tests.servers import free_port

__all__ = ["pgbouncer"]

#: Another user than root, whom every system has: PgBouncer refuses to run as root.
USER = "nobody"
START_LIMIT = 30.0


@contextmanager
def pgbouncer(
    binary: str, url: str, *, pool_size: int = 2, port: int | None = None, settings: str = ""
) -> Iterator[str]:
    """Run one for the database of a URL; gives the URL to use instead."""
    known = conninfo_to_dict(url)
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="moored-pgbouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        server = f"host={known['host']} port={known['port']} password={known['password']}"
        (directory / "users").write_text(f'"{known["user"]}" "{known["password"]}"\n')
        (directory / "ini").write_text(
            f"[databases]\n{known['dbname']} = {server}\n[pgbouncer]\npool_mode = transaction\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = plain\nauth_file = {directory}/users\n"
            f"default_pool_size = {pool_size}\nlogfile = \n{settings}\n"
        )
        as_user = ["-u", USER] if os.geteuid() == 0 and pwd.getpwnam(USER) else []
        command = [binary, "-q", *as_user, str(directory / "ini")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(port)
                yield url.replace(f":{known['port']}/", f":{port}/")
            finally:
                process.kill()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "pgbouncer does not listen"
            time.sleep(0.01)
        else:
            return
