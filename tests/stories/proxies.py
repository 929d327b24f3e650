"""nginx and PgBouncer, each with the smallest configuration of its manual: all else is default."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from psycopg.conninfo import conninfo_to_dict
from tests.servers import free_port, require_server
from tests.stories.support import LIMIT, until

__all__ = ["nginx", "pgbouncer"]

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream shop {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://{target}; {settings} }}
  }}
}}
"""
PGBOUNCER = """
[databases]
* = host={host} port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_file = {folder}/users
unix_socket_dir =
"""


class Proxy:
    """A program that listens."""

    def __init__(self, *command: str) -> None:
        self.port = free_port()
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=quiet, stderr=quiet
        )
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        await self.process.wait()


class Nginx(Proxy):
    """A running nginx."""

    def __init__(self, folder: Path, target: str = "shop", settings: str = "") -> None:
        command = [require_server("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
        super().__init__(*command, "-e", str(folder / "error.log"))
        self.folder, self._location = folder, {"target": target, "settings": settings}
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir()

    def configure(self, *ports: int) -> None:
        """Write the configuration: these replicas."""
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        text = NGINX.format(folder=self.folder, servers=servers, port=self.port, **self._location)
        (self.folder / "nginx.conf").write_text(text)

    def workers(self) -> list[psutil.Process]:
        """Return the workers that accept connections."""
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "shutting down" not in "".join(each.cmdline())]

    async def reload(self, *ports: int) -> None:
        """Use these replicas, and return when no worker accepts requests for others."""
        old = self.workers()
        self.configure(*ports)
        self.process.send_signal(signal.SIGHUP)
        await until(lambda: not {*old} & {*self.workers()}, "nginx has reloaded")


@asynccontextmanager
async def nginx(folder: Path, *ports: int, **location: str) -> AsyncIterator[Nginx]:
    """Run nginx in front of replicas; `target` and `settings` are those of its location."""
    front = Nginx(folder, **location)
    front.configure(*ports)
    await front.start()
    try:
        yield front
    finally:
        await front.stop()


class PgBouncer(Proxy):
    """A running PgBouncer."""

    def __init__(self, folder: Path, url: str) -> None:
        as_user = ["-u", "nobody"] if os.geteuid() == 0 else []
        super().__init__(require_server("pgbouncer"), "-q", *as_user, str(folder / "pgbouncer.ini"))
        known = conninfo_to_dict(url)
        #: The URL to use instead of the server's.
        self.url = url.replace(f":{known['port']}/", f":{self.port}/")
        folder.mkdir()
        folder.chmod(0o755)  # it does not run as root
        (folder / "users").write_text(f'"{known["user"]}" "{known["password"]}"\n')
        server = {"host": known["host"], "server": known["port"], "port": self.port}
        (folder / "pgbouncer.ini").write_text(PGBOUNCER.format(folder=folder, **server))


@asynccontextmanager
async def pgbouncer(folder: Path, url: str) -> AsyncIterator[PgBouncer]:
    """Run PgBouncer in front of a server."""
    pooler = PgBouncer(folder, url)
    await pooler.start()
    try:
        yield pooler
    finally:
        # With SIGTERM it would wait for its clients.
        await pooler.stop(signal.SIGKILL)
