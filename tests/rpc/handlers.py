"""Helpers of many tests: the methods of the echo server, waits, and reports of failures."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.rpc import AsyncHandler, Handler

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
    "own_threads",
    "report_broken",
]

(ECHO, SLEEP, FAIL, METADATA, LIMIT, PID, COUNT, ENDLESS, COLLECT, CHAT, MEET, MOST, ACCEPT) = (
    f"/test.Echo/{name}"
    for name in (
        *("Echo", "Sleep", "Fail", "Metadata", "Limit", "Pid"),
        *("Count", "Endless", "Collect", "Chat", "Meet", "Most", "Accept"),
    )
)


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
    report_broken(channel, error, generation)


def report_broken(channel: Handler | AsyncHandler, error: BaseException, generation: int) -> None:
    """Report an error of a generation, as a call over it would."""
    background = channel.gate.background
    background.posting.post(partial(background.broken, channel.endpoint, generation, error))
