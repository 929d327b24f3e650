"""A failed attempt leaves no channel behind that continues to connect.

A closed `grpc.aio` channel continues to dial, with gRPC's own backoff, as long as a call that was
made over it is referenced; an error references one in its frames.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

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
from moored.rpc._dial import make_aio_channel
from moored.rpc.milvus import AsyncMilvusClient, AsyncMilvusManager

from .milvus_service import Server

#: Longer than gRPC waits between two attempts: at most one second plus a fifth of it.
LONG = 1.5
WINDOWS = 4


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Disable the collector: it would free channels that only a reference cycle keeps alive."""
    gc.disable()
    yield
    gc.enable()


class RefusingServer:
    """Aborts every connection, and counts them."""

    def __init__(self, address: str = "") -> None:
        address = address or f"127.0.0.1:{free_port()}"
        self.config = ConnectionConfig.from_uri(f"http://{address}")
        self.connections = 0
        self.connected = asyncio.Event()

    async def __aenter__(self) -> RefusingServer:
        host, _, port = self.config.address.partition(":")
        self._server = await asyncio.start_server(self._refuse, host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def is_quiet(self) -> bool:
        """Whether no client connects for longer than gRPC waits between two attempts.

        A connection in progress may still arrive in the first window, late on a busy machine; a
        channel that continues to connect does so in each window.
        """
        for _ in range(WINDOWS):
            connections = self.connections
            await asyncio.sleep(LONG)
            if self.connections == connections:
                return True
        return False

    def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.connected.set()
        writer.transport.abort()


async def test_failed_attempt_of_asyncio_stops_connecting() -> None:
    async with RefusingServer() as refusing, AsyncConnectionManager() as manager:
        while not refusing.connections:  # on a busy machine, the first connection may take longer
            with pytest.raises(ConnectFailed) as kept:
                await manager.get_or_create(refusing.config, timeout=1.0)
        await manager.close()
        assert await refusing.is_quiet()
        del kept


async def test_attempt_cancelled_while_its_channel_closes_stops_connecting() -> None:
    """The attempt has failed: the cancellation references its error, whose frames hold a call."""
    closing, go_on = asyncio.Event(), asyncio.Event()

    def make(config: ConnectionConfig) -> grpc.aio.Channel:
        channel = make_aio_channel(config, 1)
        close = channel.close

        async def slowly() -> None:
            closing.set()
            await go_on.wait()
            await close()

        channel.close = slowly
        return channel

    async with (
        RefusingServer() as refusing,
        AsyncConnectionManager(handler_factory=make) as manager,
    ):
        attempt = asyncio.ensure_future(manager.get_or_create(refusing.config, timeout=60.0))
        await closing.wait()
        attempt.cancel()
        await asyncio.wait([attempt])
        go_on.set()
        await manager.close()
        assert await refusing.is_quiet()


async def test_failed_attempt_of_threads_stops_connecting() -> None:
    async with RefusingServer() as refusing:

        def attempt() -> ConnectFailed:
            with ConnectionManager() as manager:
                while not refusing.connections:
                    with pytest.raises(ConnectFailed) as kept:
                        manager.get_or_create(refusing.config, timeout=1.0)
            return kept.value

        kept = await asyncio.to_thread(attempt)
        assert await refusing.is_quiet()
        del kept


@pytest.mark.parametrize("sent", [True, False])
async def test_kept_milvus_error_keeps_no_channel_alive(sent: bool) -> None:
    """After a lost connection, a call is sent at once only to a server without Connect()."""
    server = Server()
    server.service.greets = not sent
    async with AsyncMilvusManager() as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        assert await client.get_server_version() == "1"
        server.stop()
        async with RefusingServer(server.address) as refusing:
            stub = MilvusServiceStub(client._channel)
            with pytest.raises(grpc.RpcError) as kept:
                await stub.GetVersion(GetVersionRequest(), timeout=10.0)
            assert kept.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("not sent" in str(kept.value.details())) is not sent
            async with asyncio.timeout(10.0):
                await refusing.connected.wait()
            await manager.close()
            assert await refusing.is_quiet()
