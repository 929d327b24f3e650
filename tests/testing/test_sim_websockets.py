"""The unmodified `websockets` package, client and server, on the simulated network."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from moored.testing import Host, Sim, run_one, scaled, simulate

PING, PONG, CLOSE = 20.0, 20.0, 10.0


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


async def boot(sim: Sim) -> Host:
    listening = asyncio.Event()

    async def main() -> None:
        async with serve(echo, "server", 80, ping_interval=None):
            listening.set()
            await asyncio.Event().wait()

    host = sim.host("server", main)
    await listening.wait()
    return host


def client() -> connect:
    return connect(
        "ws://server:80",
        ping_interval=PING,
        ping_timeout=PONG,
        close_timeout=CLOSE,
        compression=None,
        proxy=None,
    )


async def ask(connection: ClientConnection, question: str) -> None:
    await connection.send(question)
    assert await connection.recv() == question


async def conversation(sim: Sim) -> None:
    await boot(sim)
    async with client() as connection:
        for number in range(10):
            await ask(connection, f"question {number}")


def test_messages_arrive_however_bytes_are_split() -> None:
    simulate(conversation, scaled(50, least=10))


async def half_open(sim: Sim) -> float:
    await boot(sim)
    async with client() as connection:
        await ask(connection, "are you there?")
        sim.network.blackhole("server")
        with pytest.raises(ConnectionClosed, match="keepalive ping timeout") as caught:
            await connection.recv()
        assert caught.value.rcvd is None
        return sim.now


def test_the_keepalive_detects_a_half_open_connection_in_virtual_time() -> None:
    for seed in range(scaled(20, least=5)):
        outcome = run_one(half_open, seed, check=False)
        # A ping after 20 s, no pong for 20 s, and up to 10 s for the closing handshake.
        assert PING + PONG <= outcome.result() <= PING + PONG + CLOSE + 1
        again = run_one(half_open, seed)
        assert (again.result(), again.digest) == (outcome.result(), outcome.digest)


def test_a_client_reconnects_to_a_killed_and_restarted_server() -> None:
    async def scenario(sim: Sim) -> None:
        server = await boot(sim)
        sim.at(sim.random(0.5, 1.5), server.restart)
        answered = 0
        async for connection in client():
            try:
                while answered < 20:
                    await ask(connection, f"question {answered}")
                    answered += 1
                    await asyncio.sleep(0.1)
                break
            except ConnectionClosed:
                continue
        assert sim.now < 10

    simulate(scenario, scaled(30, least=8))
