"""One interface to both managers; calls of the thread manager run in a thread and are awaited."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import LoopThread, in_thread
from moored.rpc import AsyncConnectionManager, ConnectionConfig, ConnectionManager

from .servers import EchoServer

__all__ = ["LIMIT", "SIDES", "Aio", "Client", "Kind", "Threads", "aborted", "both", "config_of"]

LIMIT = 30.0


class Threads:
    """The manager for threads."""

    def __init__(self, **options: Any) -> None:
        self.manager = ConnectionManager(**options)

    async def get(self, config: ConnectionConfig, **named: Any) -> Any:
        return await _in_a_thread(self.manager.get_or_create, config, **named)

    async def call(
        self, channel: Any, method: str, request: bytes = b"", timeout: float = LIMIT
    ) -> bytes:
        answer: bytes = await _in_a_thread(channel.unary_unary(method), request, timeout)
        return answer

    async def run(self, function: Any, *given: Any, **named: Any) -> Any:
        """Run a function that may block, and wait until its changes are made, on the loop."""
        answer = await _in_a_thread(function, *given, **named)
        while self.manager._queue.scheduled:
            # What is submitted later runs later.
            await asyncio.wrap_future(LoopThread.shared().submit(asyncio.sleep(0)))
        return answer

    async def handle_error(self, channel: Any, error: BaseException) -> bool:
        return bool(await _in_a_thread(self.manager.handle_error, channel, error, LIMIT))

    async def __aenter__(self) -> Threads:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _in_a_thread(self.manager.close)


class Aio:
    """The manager for asyncio."""

    def __init__(self, **options: Any) -> None:
        self.manager = AsyncConnectionManager(**options)

    async def get(self, config: ConnectionConfig, **named: Any) -> Any:
        return await self.manager.get_or_create(config, **named)

    async def call(
        self, channel: Any, method: str, request: bytes = b"", timeout: float = LIMIT
    ) -> bytes:
        answer: bytes = await channel.unary_unary(method)(request, timeout=timeout)
        return answer

    async def run(self, function: Any, *given: Any, **named: Any) -> Any:
        """Await an async function."""
        return await function(*given, **named)

    async def handle_error(self, channel: Any, error: BaseException) -> bool:
        return await self.manager.handle_error(channel, error, LIMIT)

    async def __aenter__(self) -> Aio:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()


SIDES = (Threads, Aio)

Kind = type[Threads] | type[Aio]

#: Runs a test once with each manager.
both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)


class Client:
    """A client object, for `client=`."""


def config_of(server: EchoServer) -> ConnectionConfig:
    """Return the configuration for a server."""
    return ConnectionConfig.from_uri(server.uri)


def aborted(error: BaseException) -> bool:
    """A `classify` function: ABORTED asks for a new connection."""
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.ABORTED


async def _in_a_thread(call: Any, *given: Any, **named: Any) -> Any:
    return await in_thread(partial(call, *given, **named), name="caller")
