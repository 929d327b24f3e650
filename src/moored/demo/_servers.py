"""The servers that the demo runs, and may break: PostgreSQL, a gRPC server, a chat server."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg

from moored.app import ComponentContext
from moored.embedded import EmbeddedError, EmbeddedPostgres
from moored.kernel import MooredError
from moored.postgres import Outbox
from moored.testing import FaultProxy

__all__ = ["DemoFailed", "EchoProcess", "PostgresServer"]

HOST = "127.0.0.1"
SCHEMA = "create table if not exists orders (id bigint primary key, began float8 not null)"
#: Seconds that the gRPC server may take to end before it is killed.
STOP_TIMEOUT = 3.0


class DemoFailed(MooredError):
    """A server of the demo has ended, or something is missing for the demo."""


class ReservedPort:
    """A free port, known before its server starts, and kept for it while the server is down.

    On Linux, a bound socket that does not listen keeps it: clients are refused, and the kernel
    gives the port to no other program.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


class PostgresServer:
    """An embedded PostgreSQL with two paths: its port, and the port of a fault proxy.

    :ivar url: for queries.
    :ivar direct_url: for replication and notifications, through the proxy.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "postgres"
        self._password = secrets.token_urlsafe(16)
        self._server: EmbeddedPostgres | None = None
        self._port, direct = ReservedPort(), ReservedPort()
        self.proxy = FaultProxy(HOST, self._port.number, listen_port=direct.number)
        self.reserved = self._port, direct
        #: Where it listens, and where its proxy does.
        self.addresses = [f"{HOST}:{port.number}" for port in self.reserved]
        login = f"postgresql://postgres:{self._password}@{HOST}"
        self.url = f"{login}:{self._port.number}/postgres"
        self.direct_url = f"{login}:{direct.number}/postgres"

    async def run(self, ctx: ComponentContext) -> None:
        """Run the server until it ends, which is a failure: it is then started again."""
        ctx.health("starting", "PostgreSQL is being started")
        server = EmbeddedPostgres(
            self._directory,
            port=self._port.number,
            password=self._password,
            options={"fsync": "off"},
        )
        async with server, self._proxied():
            self._server = server
            async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as conn:
                await conn.execute(SCHEMA)
            async with Outbox(self.url, install=True, retain=None):
                pass  # the outbox is installed now
            ctx.show(lambda: {"pid": server.pid, "version": server.version})
            ctx.health("active", f"PostgreSQL {server.version}, pid {server.pid}")
            raise EmbeddedError(str(await server.wait_ended()))

    @asynccontextmanager
    async def _proxied(self) -> AsyncIterator[None]:
        self.proxy.heal()
        await self.proxy.start()
        try:
            yield
        finally:
            await self.proxy.close()

    def shut_down(self) -> None:
        """Request a fast shutdown, as `pg_ctl stop` does."""
        if self._server is not None and self._server.pid is not None:
            os.kill(self._server.pid, signal.SIGINT)


class EchoProcess:
    """A gRPC server in a process of its own."""

    def __init__(self) -> None:
        self.reserved = ReservedPort()
        #: Where it listens.
        self.target = f"{HOST}:{self.reserved.number}"
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, ctx: ComponentContext) -> None:
        """Run the server until it ends, which is a failure: it is then started again."""
        ctx.health("starting", "the gRPC server is being started")
        program = Path(__file__).with_name("_echo_server.py")
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            self.target,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            ctx.show(lambda: {"pid": process.pid})
            ctx.health("active", f"pid {process.pid}")
            await process.wait()
            raise DemoFailed(f"the gRPC server {_how_ended(process.returncode)}")
        finally:
            await _end(process)

    def kill(self) -> None:
        """Kill the server."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()


def _how_ended(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"has ended with status {status}"
