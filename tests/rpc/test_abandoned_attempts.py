"""Attempts whose callers have timed out, and callers with short timeouts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConnectFailed, ConnectionConfig
from moored.rpc._dial import make_aio_channel, make_channel
from moored.testing import FaultProxy

from .handlers import ECHO, eventually
from .servers import EchoServer
from .sides import LIMIT, SIDES, Aio, Threads

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]
#: Less than the 20 s after which gRPC itself gives up.
SOON = 10.0


@both
async def test_attempt_without_callers_is_abandoned(kind: Kind, echo: EchoServer) -> None:
    made: list[Any] = []
    make = make_channel if kind is Threads else make_aio_channel

    def factory(config: ConnectionConfig) -> Any:
        made.append(make(config, 3000 + len(made)))
        return made[-1]

    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        proxy.black_hole()
        config = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
        # Otherwise, the attempt would continue for this long.
        async with kind(connect_timeout=600.0, handler_factory=factory) as side:
            with pytest.raises(ConnectFailed):
                await side.get(config, timeout=0.5)
            async with asyncio.timeout(SOON):
                while side.manager._background._tasks:  # noqa: ASYNC110 - no notification
                    await asyncio.sleep(0.01)
            for channel in made:
                with pytest.raises((ValueError, grpc.aio.UsageError), match=r"(?i)closed"):
                    await side.call(channel, ECHO, b"", 1.0)
            assert side.manager.get_stats()["total_connections"] == 0


@both
async def test_caller_after_an_abandoned_attempt_connects_immediately(
    kind: Kind, echo: EchoServer
) -> None:
    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        proxy.black_hole()
        config = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
        async with kind(connect_timeout=600.0) as side:
            with pytest.raises(ConnectFailed):
                await side.get(config, timeout=0.5)
            proxy.heal()
            channel = await side.get(config, timeout=SOON)
            assert await side.call(channel, ECHO, b"hello") == b"hello"


@both
async def test_short_timeout_of_one_caller_does_not_shorten_the_attempt(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind() as side:
        await side.get(ConnectionConfig.from_uri(echo.uri), timeout=3.0)
        (managed,) = side.manager._table
        assert managed.connect_timeout == side.manager._options.connect_timeout


async def test_channel_made_after_its_attempt_was_abandoned_is_closed(echo: EchoServer) -> None:
    may_end = threading.Event()
    made: list[Any] = []

    def factory(config: ConnectionConfig) -> Any:
        assert may_end.wait(LIMIT)
        made.append(make_channel(config, 4000 + len(made)))
        return made[-1]

    async with Threads(handler_factory=factory) as side:
        with pytest.raises(ConnectFailed):
            await side.get(ConnectionConfig.from_uri(echo.uri), timeout=0.5)
        may_end.set()
        await side.run(eventually, lambda: bool(made) and _is_closed(made[0]))


def _is_closed(channel: Any) -> bool:
    try:
        channel.unary_unary(ECHO)(b"", timeout=1.0)
    except ValueError:
        return True
    except grpc.RpcError:  # it is being closed
        return False
    return False
