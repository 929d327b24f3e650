"""Keepalive pings: as rare as servers accept by default, and rarer after "too many pings"."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConnectionConfig
from moored.rpc._dial import (
    channel_options,
    make_aio_channel,
    reports_too_many_pings,
    with_rarer_pings,
)

from .handlers import ECHO, SLEEP, eventually
from .servers import EchoServer
from .sides import Aio, Threads, config_of

#: What gRPC servers accept by default: one ping in 5 minutes.
ACCEPTED_MS = 300_000
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def test_default_ping_interval_is_accepted_by_default_servers() -> None:
    options = dict(channel_options(ConnectionConfig.from_uri("http://north:1"), 1))
    assert options["grpc.keepalive_time_ms"] > ACCEPTED_MS
    assert options["grpc.keepalive_permit_without_calls"] == 0


def _user_timeouts() -> Iterator[int]:
    """Yield the TCP_USER_TIMEOUT of each TCP connection of this process, in milliseconds."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.type is socket.SOCK_STREAM and found.family in _INTERNET:
                        yield found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


async def test_tcp_user_timeout_detects_unacknowledged_requests(echo: EchoServer) -> None:
    async with Threads() as side:
        await side.get(config_of(echo))
        eventually(lambda: 5000 in _user_timeouts())


async def test_too_many_pings_doubles_the_interval_of_the_next_channel() -> None:
    made: list[Any] = []

    def make(config: ConnectionConfig) -> grpc.aio.Channel:
        options = channel_options(config, len(made))
        made.append(dict(options)["grpc.keepalive_time_ms"])
        return make_aio_channel(config, len(made))

    with EchoServer() as server:
        impatient = {"grpc.keepalive_time_ms": 50, "grpc.http2.max_pings_without_data": 0}
        config = ConnectionConfig.from_uri(server.uri, channel_options=impatient)
        async with Aio(handler_factory=make) as side:
            channel = await side.get(config)
            with pytest.raises(grpc.RpcError, match="Too many pings"):
                await side.call(channel, SLEEP, b"20")
            async with asyncio.timeout(30.0):  # gRPC reports the loss after it has ended the call
                while channel.generation == 1:  # noqa: ASYNC110 - no notification
                    await asyncio.sleep(0.005)
            assert await side.call(channel, ECHO, b"a") == b"a"
            assert channel.generation == 2
            assert made == [50, 100]


def test_rarer_pings_keep_other_channel_options() -> None:
    given = {"grpc.keepalive_time_ms": 1000, "mine": 2}
    config = ConnectionConfig.from_uri("http://north:1", channel_options=given)
    assert with_rarer_pings(config, 1) is config
    slower = dict(channel_options(with_rarer_pings(config, 4), 1))
    assert (slower["grpc.keepalive_time_ms"], slower["mine"]) == (4000, 2)
    plain = ConnectionConfig.from_uri("http://north:1", channel_options=[("mine", 2)])
    assert dict(channel_options(with_rarer_pings(plain, 2), 1))["grpc.keepalive_time_ms"] == 660_000
    assert not reports_too_many_pings(None)
    assert not reports_too_many_pings(ConnectionError("Socket closed"))
