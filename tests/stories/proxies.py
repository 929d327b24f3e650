"""nginx and PgBouncer, each with the smallest configuration of its manual: all else is default."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from psycopg.conninfo import conninfo_to_dict
from tests.servers import free_port, require_server
from tests.stories.support import LIMIT, until

__all__ = ["Nginx", "nginx", "pgbouncer"]

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


class Nginx:
    """A running nginx."""

    def __init__(self, folder: Path, target: str = "shop", settings: str = "") -> None:
        self.folder, self.port = folder, free_port()
        self._location = {"target": target, "settings": settings}
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None
        folder.mkdir()

    def configure(self, *ports: int) -> None:
        """Write the configuration: these replicas."""
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        text = NGINX.format(folder=self.folder, servers=servers, port=self.port, **self._location)
        (self.folder / "nginx.conf").write_text(text)

    def workers(self) -> list[psutil.Process]:
        """Return the workers that accept connections."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "shutting down" not in "".join(each.cmdline())]

    async def reload(self, *ports: int) -> None:
        """Use these replicas, and return when no worker accepts requests for others."""
        assert self.process is not None
        old = self.workers()
        self.configure(*ports)
        psutil.Process(self.process.pid).send_signal(1)
        await until(lambda: not {*old} & {*self.workers()}, "nginx has reloaded")


@asynccontextmanager
async def nginx(folder: Path, *ports: int, **location: str) -> AsyncIterator[Nginx]:
    """Run nginx in front of replicas; `target` and `settings` are those of its location."""
    front = Nginx(folder, **location)
    front.configure(*ports)
    command = [require_server("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    front.process = await asyncio.create_subprocess_exec(*command, "-e", str(folder / "error.log"))
    try:
        await _listens(front.port)
        yield front
    finally:
        front.process.terminate()
        await front.process.wait()


@asynccontextmanager
async def pgbouncer(folder: Path, url: str) -> AsyncIterator[str]:
    """Run PgBouncer in front of a server; gives the URL to use instead."""
    port = free_port()
    ini = _configure(folder, url, port)
    as_user = ["-u", "nobody"] if os.geteuid() == 0 else []
    command = [require_server("pgbouncer"), "-q", *as_user, str(ini)]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await _listens(port)
        yield url.replace(f":{conninfo_to_dict(url)['port']}/", f":{port}/")
    finally:
        process.kill()
        await process.wait()


def _configure(folder: Path, url: str, port: int) -> Path:
    known = conninfo_to_dict(url)
    folder.mkdir()
    folder.chmod(0o755)  # it does not run as root
    (folder / "users").write_text(f'"{known["user"]}" "{known["password"]}"\n')
    server = {"host": known["host"], "server": known["port"], "port": port, "folder": folder}
    ini = folder / "pgbouncer.ini"
    ini.write_text(PGBOUNCER.format(**server))
    return ini


async def _listens(port: int) -> None:
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
