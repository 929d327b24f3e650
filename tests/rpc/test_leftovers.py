"""What an attempt that has failed leaves behind: nothing that goes on connecting.

A channel of `grpc.aio` that is closed goes on dialling, with gRPC's own pauses, as long as somebody
has a call that was made over it; and an error has one in its frames.
"""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
import pytest
from pymilvus.grpc_gen.milvus_pb2 import (  # type: ignore[import-untyped]
    GetVersionRequest,
)
from pymilvus.grpc_gen.milvus_pb2_grpc import (  # type: ignore[import-untyped]
    MilvusServiceStub,
)
from tests.servers import free_port

from moored.rpc import (
    AsyncConnectionManager,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
)
from moored.rpc.milvus import AsyncMilvusClient, AsyncMilvusManager

from .milvus_service import Server

#: Longer than gRPC waits after a first failure, which is a second, give or take a fifth.
LONG = 1.5
SHORT = 0.2


class Door:
    """Whoever comes is sent away; they are counted."""

    def __init__(self, address: str = "") -> None:
        address = address or f"127.0.0.1:{free_port()}"
        self.config = ConnectionConfig.from_uri(f"http://{address}")
        self.knocks = 0

    async def __aenter__(self) -> Door:
        host, _, port = self.config.address.partition(":")
        self._server = await asyncio.start_server(self._turn_away, host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def rests(self) -> bool:
        """Whether somebody came, and nobody comes any more."""
        await asyncio.sleep(SHORT)  # for one who is on the way
        knocks = self.knocks
        await asyncio.sleep(LONG)
        return self.knocks == knocks > 0

    def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        writer.transport.abort()


async def test_a_failed_attempt_of_asyncio_is_over() -> None:
    async with Door() as door, AsyncConnectionManager() as manager:
        with pytest.raises(ConnectFailed) as kept:
            await manager.get_or_create(door.config, timeout=1.0)
        await manager.close()
        assert await door.rests()
        del kept


async def test_a_failed_attempt_of_threads_is_over() -> None:
    async with Door() as door:

        def attempt() -> ConnectFailed:
            with ConnectionManager() as manager, pytest.raises(ConnectFailed) as kept:
                manager.get_or_create(door.config, timeout=1.0)
            return kept.value

        kept = await asyncio.to_thread(attempt)
        assert await door.rests()
        del kept


async def test_an_error_of_milvus_that_is_kept_keeps_no_channel() -> None:
    server = Server()
    async with AsyncMilvusManager() as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        assert await client.get_server_version() == "1"
        server.stop()
        async with Door(server.address) as door:
            stub = MilvusServiceStub(client._channel)
            with pytest.raises(grpc.RpcError) as kept:
                await stub.GetVersion(GetVersionRequest(), timeout=10.0)
            assert kept.value.code() is grpc.StatusCode.UNAVAILABLE
            await manager.close()
            assert await door.rests()
