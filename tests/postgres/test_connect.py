"""An abandoned connection attempt ends at the server, too."""

from __future__ import annotations

import asyncio

import pytest
from tests.silent_server import silent_server

from moored.postgres.server._connect import connect
from moored.postgres.stream._link import ReplicationLink


async def test_a_cancelled_attempt_closes_its_socket() -> None:
    async with silent_server() as server, asyncio.timeout(30.0):
        conninfo = f"host=127.0.0.1 port={server.port} user=x dbname=x"
        task = asyncio.create_task(connect(conninfo))
        await server.arrived.wait()
        task.cancel()
        await asyncio.wait({task})
        await server.gone.wait()
        assert task.cancelled()  # whoever has the task does not have the socket


async def test_an_attempt_that_times_out_closes_its_socket() -> None:
    async with silent_server() as server, asyncio.timeout(30.0):
        conninfo = f"host=127.0.0.1 port={server.port} user=x dbname=x"
        with pytest.raises(TimeoutError) as kept:
            await ReplicationLink.dial(conninfo, timeout=0.1)
        await server.gone.wait()
        assert kept.value.__cause__ is not None  # it is still known what happened
