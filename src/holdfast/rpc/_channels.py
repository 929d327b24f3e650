"""What is done with channels of either kind: wait for them, ask over them, close them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ._dial import close_channel, ready
from ._live import Live
from ._managed import ManagedConnection
from ._policy import Policy
from ._threads import in_thread
from ._works import PROBE_TIMEOUT

__all__ = ["AioChannels", "ThreadChannels"]

_HEALTH = "/grpc.health.v1.Health/Check"
#: `grpc.health.v1.HealthCheckResponse` with the status SERVING.
_SERVING = b"\x08\x01"
#: A server that says this to the question how it is does at least answer.
_ANSWERS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


class _Channels:
    def __init__(self, policy: Policy) -> None:
        self._probe = policy.probe

    async def ready(self, channel: Any) -> None:
        """Wait until it is connected; what is no channel of gRPC's is."""
        if isinstance(channel, (grpc.Channel, grpc.aio.Channel)):
            await ready(channel)
        elif (wait := getattr(channel, "channel_ready", None)) is not None:
            await wait()

    async def close(self, channel: Any) -> None:
        """Close one that no call was made over."""
        if isinstance(channel, (grpc.Channel, grpc.aio.Channel)):
            await close_channel(channel)
        elif inspect.isawaitable(closing := channel.close()):
            await closing


class ThreadChannels(_Channels):
    """For channels of threads: what blocks does so elsewhere."""

    async def probe(self, managed: ManagedConnection[Any], live: Live) -> bool:
        """Whether the server answers over it."""
        probe = self._probe or _ask
        return bool(
            await asyncio.wrap_future(
                in_thread(lambda: probe(live.channel), name="holdfast-rpc-probe")
            )
        )


class AioChannels(_Channels):
    """For channels of asyncio."""

    async def probe(self, managed: ManagedConnection[Any], live: Live) -> bool:
        """Whether the server answers over it."""
        outcome = (self._probe or _ask_aio)(live.channel)
        return bool(await outcome if inspect.isawaitable(outcome) else outcome)


def _ask(channel: grpc.Channel) -> bool:
    try:
        answer: bytes = channel.unary_unary(_HEALTH)(b"", timeout=PROBE_TIMEOUT)
    except grpc.RpcError as error:
        return error.code() in _ANSWERS
    return answer == _SERVING


async def _ask_aio(channel: grpc.aio.Channel) -> bool:
    try:
        answer: bytes = await channel.unary_unary(_HEALTH)(b"", timeout=PROBE_TIMEOUT)
    except grpc.RpcError as error:
        return error.code() in _ANSWERS
    return answer == _SERVING
