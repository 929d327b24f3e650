"""A network between the listener and the server that swallows packets, and servers for breaks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.stream_server import stream_server

from moored.postgres.listen import Gap, Listener, Notification, Subscription

__all__ = [
    "LIMIT",
    "BlackHole",
    "black_hole",
    "flow",
    "flow_after_gap",
    "flow_until_gap",
    "listener_pids",
    "next_event",
    "run_sql",
    "until",
    "until_down",
]

#: How long anything may take that takes at most 10 s on an idle machine.
LIMIT = 30.0
_numbers = itertools.count(1)


async def run_sql(url: str, sql: str) -> list[Any]:
    """Run a statement on a connection of the test's own."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        cursor = await conn.execute(sql.encode())
        return [] if cursor.description is None else await cursor.fetchall()


async def listener_pids(url: str, name: str = "moored listener") -> list[int]:
    """The server processes of listeners with this application name."""
    query = f"select pid from pg_stat_activity where application_name = '{name}'"
    return [pid for (pid,) in await run_sql(url, query)]


async def next_event(events: Subscription, limit: float = LIMIT) -> Notification | Gap:
    """The next event of a subscription."""
    return await asyncio.wait_for(anext(events), limit)


async def until(condition: Callable[[], Awaitable[object]], limit: float = LIMIT) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(limit):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.02)


@asynccontextmanager
async def flow(url: str) -> AsyncIterator[None]:
    """Notifications on channel a all the time, by a connection that is replaced when it is lost.

    They are numbered: "2/17" is the eighteenth of the third connection.
    """

    async def send() -> None:
        for connection in itertools.count():
            with contextlib.suppress(psycopg.OperationalError):
                async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                    for number in itertools.count():
                        await conn.execute(f"notify a, '{connection}/{number}'".encode())
                        await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait({sending})


async def flow_until_gap(events: Subscription) -> Gap:
    """Return the next gap; no notification is missing before it."""
    before: list[str] = []
    while not isinstance(event := await next_event(events), Gap):
        before.append(event.payload)
    assert_unbroken(before)
    return event


async def flow_after_gap(events: Subscription, count: int = 20) -> None:
    """Notifications arrive, and none is missing."""
    found = [await next_event(events) for _ in range(count)]
    assert_unbroken([event.payload for event in found if isinstance(event, Notification)])
    assert not any(isinstance(event, Gap) for event in found), found


def assert_unbroken(payloads: list[str]) -> None:
    """The numbers of each connection follow each other."""
    numbers = [tuple(map(int, payload.split("/"))) for payload in payloads]
    for (one, first), (other, second) in itertools.pairwise(numbers):
        assert (other, second) == ((one, first + 1) if one == other else (other, 0)), payloads


async def until_down(listener: Listener) -> None:
    """Wait until the listener has noticed that its connection is lost."""
    await listener.monitor.wait_until(lambda health: not listener.up, LIMIT)


class BlackHole:
    """A link that can be cut without a packet for either side.

    A relay accepts connections in a network namespace, and passes them on to the server; the link
    between the two namespaces is cut. The relay is beyond the cut, so nobody answers keepalives.
    """

    def __init__(self, url: str, name: str, host: str, port: int) -> None:
        self._name = name
        known = conninfo_to_dict(url)
        self._server = str(known["host"]), int(str(known["port"]))
        self.url = url.replace(f"{known['host']}:{known['port']}", f"{host}:{port}")

    def cut(self) -> None:
        """Drop every packet, in both directions."""
        _run("ip", "-n", self._name, "link", "set", f"{self._name}b", "down")

    def heal(self) -> None:
        """Pass packets on again."""
        _run("ip", "-n", self._name, "link", "set", f"{self._name}b", "up")

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the bytes of one connection on, in both directions."""
        to_reader, to_writer = await asyncio.open_connection(*self._server)
        try:
            await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))
        finally:
            to_writer.transport.abort()
            with contextlib.suppress(OSError):
                await to_writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()  # so that the other direction ends, too


@asynccontextmanager
async def black_hole(url: str) -> AsyncIterator[BlackHole]:
    """A path to the server that can be cut silently."""
    # So many that tests and benchmarks that run at the same time have different ones.
    number = (os.getpid() * 10 + next(_numbers)) % 2**14
    name, third, fourth = f"mrd{number}", number // 64, number % 64 * 4
    ours, theirs = (f"10.213.{third}.{fourth + host}" for host in (1, 2))
    try:
        _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root and the program ip")
    try:
        _run("ip", "link", "add", f"{name}a", "type", "veth", "peer", f"{name}b", "netns", name)
        _run("ip", "address", "add", f"{ours}/30", "dev", f"{name}a")
        _run("ip", "link", "set", f"{name}a", "up")
        _run("ip", "-n", name, "address", "add", f"{theirs}/30", "dev", f"{name}b")
        _run("ip", "-n", name, "link", "set", f"{name}b", "up")
        sock = _socket_in(name, theirs)
        hole = BlackHole(url, name, theirs, sock.getsockname()[1])
        async with stream_server(hole.relay, sock=sock):
            yield hole
    finally:
        _run("ip", "netns", "del", name)


def _socket_in(namespace: str, host: str) -> socket.socket:
    """A listening socket of another network namespace; sockets stay where they were made."""
    made: list[socket.socket] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}") as there:
            assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        made.append(socket.create_server((host, 0)))

    thread = threading.Thread(target=make)  # only this thread changes its namespace
    thread.start()
    thread.join()
    return made[0]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
