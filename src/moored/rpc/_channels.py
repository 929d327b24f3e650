"""Wait for and probe the channels of either kind: `grpc.Channel` and `grpc.aio.Channel`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import all_of, awaited, run_callback

from ._channel_pool import lanes_of
from ._dial import ended_call, ready
from ._errors import ConfigError
from ._fork import inside

__all__ = ["PROBE_TIMEOUT", "answers", "until_ready"]

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


async def until_ready(kind: type, channel: Any) -> None:
    """Wait until the channel, or each channel of a pool, is connected.

    An object that is no gRPC channel and has no `channel_ready` counts as connected.

    :param kind: the kind of the manager's channels: `grpc.Channel` or `grpc.aio.Channel`.
    """
    await all_of(*(_until_ready(kind, lane) for lane in lanes_of(channel)))


async def _until_ready(kind: type, channel: Any) -> None:
    threads = kind is grpc.Channel
    if channel is None or isinstance(channel, grpc.aio.Channel if threads else grpc.Channel):
        raise ConfigError(
            f"handler_factory or the strategy must return a {'grpc' if threads else 'grpc.aio'}"
            ".Channel for this manager, "
            f"not {'None' if channel is None else 'a channel for the other kind of manager'}"
        )
    if isinstance(channel, kind):
        await ready(channel)
    elif (wait := getattr(channel, "channel_ready", None)) is not None:
        await wait()


async def answers(kind: type, channel: Any, probe: Callable[[Any], Any] | None) -> bool:
    """Whether the server answers over the channel, or over each channel of a pool.

    :param probe: checks one channel, plain or async; by default with `grpc.health.v1`.
    """
    return all(await all_of(*(_answers(kind, lane, probe) for lane in lanes_of(channel))))


async def _answers(kind: type, channel: Any, probe: Callable[[Any], Any] | None) -> bool:
    if probe is None:
        return await _is_serving(channel)
    if kind is grpc.aio.Channel:
        return bool(await awaited(probe(channel)))
    # A blocking call has a thread of its own.
    return bool(await run_callback(partial(_inside, probe, channel), name="moored-rpc-probe"))


def _inside(probe: Callable[[Any], Any], channel: grpc.Channel) -> Any:
    with inside():
        return probe(channel)


async def _is_serving(channel: Any) -> bool:
    call = await ended_call(channel, channel.unary_unary(_HEALTH), timeout=PROBE_TIMEOUT)
    code = await call.code()
    return bool(await call == _SERVING if code is grpc.StatusCode.OK else code not in _SILENT)
