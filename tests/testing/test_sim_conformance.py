"""Protocols get the same callbacks over simulated connections as over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moored.testing import Sim, run_one, scaled


class Log(asyncio.Protocol):
    """Records its callbacks and bytes, for tests to wait for."""

    def __init__(self, *, keep_open: bool) -> None:
        self.events: list[str] = []
        self.received = bytearray()
        self.transport: Any = None
        self._keep_open = keep_open
        self._changed = asyncio.Event()

    def _add(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._add("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._changed.set()

    def eof_received(self) -> bool:
        self._add("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self._add("pause")

    def resume_writing(self) -> None:
        self._add("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self._add("lost" if exc is None else f"lost: {type(exc).__name__}")

    async def until(self, condition: Callable[[Log], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def sees(self, event: str) -> None:
        await self.until(lambda log: event in log.events)

    async def ends(self) -> None:
        await self.until(lambda log: log.events[-1].startswith("lost"))

    def __repr__(self) -> str:
        return f"{self.events} {len(self.received)} bytes"


Case = Callable[[Log, Log], Awaitable[None]]


async def close(near: Log, far: Log) -> None:
    near.transport.write(b"bye")
    near.transport.close()
    await near.ends()
    await far.ends()


async def large_close(near: Log, far: Log) -> None:
    near.transport.write(b"x" * 8_000_000)
    near.transport.close()
    await far.ends()
    await near.ends()


async def half_close(near: Log, far: Log) -> None:
    near.transport.write(b"question")
    near.transport.write_eof()
    await far.sees("eof")
    if not far.transport.is_closing():
        far.transport.write(b"answer")
        far.transport.close()
        await near.sees("eof")
        near.transport.close()
    await near.ends()
    await far.ends()


async def both_half_close(near: Log, far: Log) -> None:
    near.transport.write_eof()
    far.transport.write_eof()
    await near.sees("eof")
    await far.sees("eof")
    near.transport.close()
    far.transport.close()
    await near.ends()
    await far.ends()


async def abort(near: Log, far: Log) -> None:
    near.transport.write(b"half a mess")
    await far.until(lambda log: len(log.received) == 11)
    near.transport.abort()
    await near.ends()
    await far.ends()


async def abort_unread(near: Log, far: Log) -> None:
    """Close a socket that has unread bytes, which resets the connection."""
    near.transport.pause_reading()
    far.transport.write(b"unread")
    await asyncio.sleep(0.05)
    near.transport.abort()
    await near.ends()
    await far.ends()


async def back_pressure(near: Log, far: Log) -> None:
    far.transport.pause_reading()
    near.transport.write(b"x" * 8_000_000)
    await near.sees("pause")
    far.transport.resume_reading()
    await near.sees("resume")
    await far.until(lambda log: len(log.received) == 8_000_000)
    near.transport.close()
    await near.ends()
    await far.ends()


async def write_after_the_end(near: Log, far: Log) -> None:
    """Write to a closed peer, which answers with a reset that the next write notices."""
    far.transport.close()
    await near.sees("eof")
    while not near.transport.is_closing():
        near.transport.write(b"anybody?")
        await asyncio.sleep(0.01)
    await near.ends()
    await far.ends()


# Each with the value that eof_received() returns.
CASES = [
    (close, False),
    (large_close, False),
    (half_close, False),
    (half_close, True),
    (both_half_close, False),
    (both_half_close, True),
    (abort, False),
    (abort_unread, False),
    (abort_unread, True),
    (back_pressure, False),
    (write_after_the_end, True),
]


async def converse(case: Case, host: str, *, keep_open: bool) -> tuple[str, str]:
    loop = asyncio.get_running_loop()
    near, far = Log(keep_open=keep_open), Log(keep_open=keep_open)
    server = await loop.create_server(lambda: far, host, 0)
    port = server.sockets[0].getsockname()[1]
    await loop.create_connection(lambda: near, host, port)
    await far.sees("made")
    await case(near, far)
    server.close()
    await server.wait_closed()
    return repr(near), repr(far)


@pytest.mark.parametrize(("case", "keep_open"), CASES)
async def test_simulated_and_real_sockets_make_the_same_callbacks(
    case: Case, keep_open: bool
) -> None:
    real = await converse(case, "127.0.0.1", keep_open=keep_open)
    simulated = await asyncio.to_thread(_simulate, case, keep_open)
    assert simulated == {real}


def _simulate(case: Case, keep_open: bool) -> set[tuple[str, str]]:
    async def scenario(sim: Sim) -> tuple[str, str]:
        return await converse(case, "server", keep_open=keep_open)

    return {run_one(scenario, seed).result() for seed in range(scaled(10, least=3))}
