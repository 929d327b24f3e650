"""What an attempt that has failed leaves behind: nothing that goes on connecting.

A channel of `grpc.aio` that is closed goes on dialling, with gRPC's own pauses, as long as somebody
has a call that was made over it; and an error has one in its frames.
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

#: Longer than gRPC waits between two attempts, which is a second at most, give or take a fifth.
LONG = 1.5
WINDOWS = 4


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """A collection would end what only a cycle of references keeps alive."""
    gc.disable()
    yield
    gc.enable()


class Door:
    """Whoever comes is sent away; they are counted."""

    def __init__(self, address: str = "") -> None:
        address = address or f"127.0.0.1:{free_port()}"
        self.config = ConnectionConfig.from_uri(f"http://{address}")
        self.knocks = 0
        self.knocked = asyncio.Event()

    async def __aenter__(self) -> Door:
        host, _, port = self.config.address.partition(":")
        self._server = await asyncio.start_server(self._turn_away, host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def rests(self) -> bool:
        """Whether no client connects for longer than gRPC waits between two attempts.

        A connection that was on its way may still come first, and late on a busy machine; a channel
        that goes on connecting does so in each window.
        """
        for _ in range(WINDOWS):
            knocks = self.knocks
            await asyncio.sleep(LONG)
            if self.knocks == knocks:
                return True
        return False

    def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        self.knocked.set()
        writer.transport.abort()


async def test_a_failed_attempt_of_asyncio_is_over() -> None:
    async with Door() as door, AsyncConnectionManager() as manager:
        while not door.knocks:  # on a busy machine, the first connection may take longer
            with pytest.raises(ConnectFailed) as kept:
                await manager.get_or_create(door.config, timeout=1.0)
        await manager.close()
        assert await door.rests()
        del kept


async def test_an_attempt_that_is_given_up_while_its_channel_closes_is_over() -> None:
    """It has failed already: the cancellation has that error, and in its frames a call."""
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

    async with Door() as door, AsyncConnectionManager(handler_factory=make) as manager:
        attempt = asyncio.ensure_future(manager.get_or_create(door.config, timeout=60.0))
        await closing.wait()
        attempt.cancel()
        await asyncio.wait([attempt])
        go_on.set()
        await manager.close()
        assert await door.rests()


async def test_a_failed_attempt_of_threads_is_over() -> None:
    async with Door() as door:

        def attempt() -> ConnectFailed:
            with ConnectionManager() as manager:
                while not door.knocks:
                    with pytest.raises(ConnectFailed) as kept:
                        manager.get_or_create(door.config, timeout=1.0)
            return kept.value

        kept = await asyncio.to_thread(attempt)
        assert await door.rests()
        del kept


@pytest.mark.parametrize("sent", [True, False])
async def test_an_error_of_milvus_that_is_kept_keeps_no_channel(sent: bool) -> None:
    """After the loss of a connection, a call is sent only where greetings are not known."""
    server = Server()
    server.service.greets = not sent
    async with AsyncMilvusManager() as manager:
        client = AsyncMilvusClient(server.uri, manager=manager)
        assert await client.get_server_version() == "1"
        server.stop()
        async with Door(server.address) as door:
            stub = MilvusServiceStub(client._channel)
            with pytest.raises(grpc.RpcError) as kept:
                await stub.GetVersion(GetVersionRequest(), timeout=10.0)
            assert kept.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("not sent" in str(kept.value.details())) is not sent
            async with asyncio.timeout(10.0):
                await door.knocked.wait()
            await manager.close()
            assert await door.rests()
