"""Helpers for the tests of both handlers: connected generations, and waits."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.rpc._config import ConnectionConfig
from moored.rpc._dial import make_aio_channel, make_channel, ready
from moored.rpc._generations import Generations
from moored.rpc._handler import Handler
from moored.rpc._handler_async import AsyncHandler
from moored.rpc._live_channel import LiveChannel

__all__ = [
    "ACCEPT",
    "CHAT",
    "COLLECT",
    "COUNT",
    "ECHO",
    "ENDLESS",
    "FAIL",
    "LIMIT",
    "MEET",
    "METADATA",
    "MOST",
    "PID",
    "SLEEP",
    "descriptors",
    "eventually",
    "loss_noticed",
    "loss_noticed_async",
    "new_aio_live",
    "new_live",
    "opened",
    "own_threads",
]

H = TypeVar("H", bound=Generations)

(ECHO, SLEEP, FAIL, METADATA, LIMIT, PID, COUNT, ENDLESS, COLLECT, CHAT, MEET, MOST, ACCEPT) = (
    f"/test.Echo/{name}"
    for name in (
        *("Echo", "Sleep", "Fail", "Metadata", "Limit", "Pid"),
        *("Count", "Endless", "Collect", "Chat", "Meet", "Most", "Accept"),
    )
)

_numbers = itertools.count(1)


def new_live(uri: str, number: int = 0) -> LiveChannel:
    """Make the next generation, connected."""
    config = ConnectionConfig.from_uri(uri)
    number = number or next(_numbers)
    channel = make_channel(config, number)
    asyncio.run(asyncio.wait_for(ready(channel), 10))
    return LiveChannel(number, channel, config.address)


async def new_aio_live(uri: str, number: int = 0) -> LiveChannel:
    """The same for asyncio."""
    config = ConnectionConfig.from_uri(uri)
    number = number or next(_numbers)
    channel = make_aio_channel(config, number)
    await asyncio.wait_for(ready(channel), 10)
    return LiveChannel(number, channel, config.address)


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def own_threads() -> int:
    """Return how many threads there are, without the idle ones of an executor."""
    return sum(not each.name.startswith("asyncio_") for each in threading.enumerate())


def eventually(holds: Callable[[], bool], limit: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + limit
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        pause.wait(0.005)


def loss_noticed(channel: Handler, generation: int = 1) -> None:
    """Wait until the manager has noticed the loss of a generation: until then calls still fail.

    gRPC ends the calls of a lost connection a moment before it reports the loss. If that moment is
    longer than the manager's check, the next failed call makes it check again, as this does.
    """

    def noticed() -> bool:
        _fail_again(channel, generation)
        return channel.generation != generation

    eventually(noticed, 30.0)


async def loss_noticed_async(channel: Handler | AsyncHandler) -> None:
    """The same for generation 1, without blocking the loop, for the channels of both managers."""
    async with asyncio.timeout(30.0):
        while channel.generation == 1:
            _fail_again(channel, 1)
            await asyncio.sleep(0.005)


def _fail_again(channel: Handler | AsyncHandler, generation: int) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
    assert channel._on_rpc_error is not None
    channel._on_rpc_error(error, generation)


def opened(handler: H, live: LiveChannel | None = None, **callbacks: Any) -> H:
    """Give a handler the callbacks and the first generation that it gets from a manager."""
    for name, callback in callbacks.items():
        setattr(handler, f"_{name}", callback)
    if live is not None:
        handler._swap(live)
    return handler
