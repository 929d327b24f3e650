"""Wait for, probe and close the channels of either kind: `grpc.Channel` and `grpc.aio.Channel`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import all_of, awaited, in_thread

from ._channel_pool import lanes_of
from ._dial import close_channel, ended_call, ready
from ._errors import ConfigError
from ._fork import inside
from ._manager_options import ManagerOptions

__all__ = ["PROBE_TIMEOUT", "AioChannels", "Channels", "ThreadChannels"]

#: The timeout of a probe, in seconds.
PROBE_TIMEOUT = 5.0

_HEALTH = "/grpc.health.v1.Health/Check"
#: `grpc.health.v1.HealthCheckResponse` with the status SERVING.
_SERVING = b"\x08\x01"
#: Codes that gRPC itself returns when the server does not answer. Any other code is an answer of
#: the server, such as UNIMPLEMENTED or UNAUTHENTICATED.
_SILENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class Channels:
    """Operations on the channels of one kind."""

    #: The name of the kind, and the class of the other kind, which is refused.
    wanted: str
    other: type

    def __init__(self, policy: ManagerOptions) -> None:
        self._probe = policy.probe

    async def ready(self, channel: Any) -> None:
        """Wait until the channel, or each channel of a pool, is connected.

        An object that is no gRPC channel and has no `channel_ready` counts as connected.
        """
        await all_of(*(self._ready(lane) for lane in lanes_of(channel)))

    async def _ready(self, channel: Any) -> None:
        if channel is None or isinstance(channel, self.other):
            raise ConfigError(
                f"handler_factory or the strategy must return a {self.wanted} for this manager, "
                f"not {'None' if channel is None else 'a channel for the other kind of manager'}"
            )
        if isinstance(channel, (grpc.Channel, grpc.aio.Channel)):
            await ready(channel)
        elif (wait := getattr(channel, "channel_ready", None)) is not None:
            await wait()

    async def probe(self, channel: Any) -> bool:
        """Whether the server answers over the channel, or over each channel of a pool."""
        return all(await all_of(*(self._answers(lane) for lane in lanes_of(channel))))

    async def _answers(self, channel: Any) -> bool:
        raise NotImplementedError

    async def close(self, channel: Any) -> None:
        """Close a channel without calls."""
        if isinstance(channel, (grpc.Channel, grpc.aio.Channel)):
            await close_channel(channel)
        else:
            await awaited(channel.close())


class ThreadChannels(Channels):
    """For `grpc.Channel`s: blocking calls run in threads of their own."""

    wanted, other = "grpc.Channel", grpc.aio.Channel

    async def _answers(self, channel: Any) -> bool:
        if self._probe is None:
            return await _is_serving(channel)
        call = partial(_inside, self._probe, channel)
        return bool(await in_thread(call, name="moored-rpc-probe"))


class AioChannels(Channels):
    """For `grpc.aio.Channel`s."""

    wanted, other = "grpc.aio.Channel", grpc.Channel

    async def _answers(self, channel: Any) -> bool:
        outcome = (self._probe or _is_serving)(channel)
        return bool(await awaited(outcome))


def _inside(probe: Callable[[Any], Any], channel: grpc.Channel) -> Any:
    with inside():
        return probe(channel)


async def _is_serving(channel: Any) -> bool:
    call = await ended_call(channel, channel.unary_unary(_HEALTH), timeout=PROBE_TIMEOUT)
    code = await call.code()
    return bool(await call == _SERVING if code is grpc.StatusCode.OK else code not in _SILENT)
