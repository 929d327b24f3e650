"""How a channel is made, and what an outage means: for one server, and for one that moves.

A strategy belongs to one connection. It makes the channel of each generation (`create_handler`),
is asked when calls fail whether a new one may help (`on_unavailable`), and lets go of what it has
at the end. It never holds a lock while it waits.

The two global ones follow a topology, which is written once, async (`Follower`): it runs on the
user's own loop, or on the private one of users of threads.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from moored.kernel import LoopThread, awaited

from ._channel_pool import pooled, pooled_async
from ._config import ConnectionConfig
from ._fork import inside
from .topology._follower import Follower, HandlerFactory, Managed

__all__ = [
    "AsyncGlobalStrategy",
    "AsyncRegularStrategy",
    "ConnectionStrategy",
    "GlobalStrategy",
    "RegularStrategy",
]

# A number for each channel of the process, so that no two share a connection.
_numbers = itertools.count(1)


class ConnectionStrategy(ABC):
    """How one connection is made, and made again; its methods may be plain or async."""

    #: Where the channel that was made last leads; None, if the configuration says it.
    address: str | None = None
    #: Whether `on_unavailable` always says yes, so that calls need not fail until it is asked.
    always_recovers = False

    @abstractmethod
    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel for a new generation."""

    @abstractmethod
    def on_unavailable(self, managed: Managed) -> bool | Awaitable[bool]:
        """The server cannot be reached: whether a new channel may help."""

    @abstractmethod
    def close(self, managed: Managed) -> None:
        """Let go of everything, the handler too."""

    async def close_async(self, managed: Managed) -> None:
        """Let go of everything, from a loop."""
        self.close(managed)


class RegularStrategy(ConnectionStrategy):
    """One server, which may restart.

    :param handler_factory: makes a channel; gRPC's own, if it is not given.
    :param channels: how many of them are used as one, for a server that limits the calls of each.
    """

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled(handler_factory or _channel, channels)

    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the server."""
        with inside():
            return self._factory(config)

    def on_unavailable(self, managed: Managed) -> bool:
        """Always: a new channel does not inherit the pauses of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Close the handler."""
        managed.handler.close()


class AsyncRegularStrategy(ConnectionStrategy):
    """One server, which may restart; for asyncio. Parameters: see `RegularStrategy`."""

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled_async(handler_factory or _aio_channel, channels)

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the server."""
        return await awaited(self._factory(config))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Always: a new channel does not inherit the pauses of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Nothing: the handler can only be closed with `close_async`."""

    async def close_async(self, managed: Managed) -> None:
        """Close the handler."""
        await awaited(managed.handler.close())


class GlobalStrategy(Follower, ConnectionStrategy):
    __doc__ = f"A server that moves, for threads.\n{Follower.__doc__}"

    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the member that is wanted; the first time, the topology is fetched."""
        target = LoopThread.shared().run(self._locate(config))
        with inside():
            return pooled(self._factory or _channel, self._channels)(target)

    def on_unavailable(self, managed: Managed) -> bool:
        """Fetch a fresh topology, if that can be had soon; a new channel may help in any case."""
        return LoopThread.shared().run(self._reconsider(managed))

    def close(self, managed: Managed) -> None:
        """Stop following the topology, and close the handler."""
        self._stop()
        managed.handler.close()


class AsyncGlobalStrategy(Follower, ConnectionStrategy):
    __doc__ = f"A server that moves, for asyncio.\n{Follower.__doc__}"

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the member that is wanted; the first time, the topology is fetched."""
        target = await self._locate(config)
        make = pooled_async(self._factory or _aio_channel, self._channels)
        return await awaited(make(target))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Fetch a fresh topology, if that can be had soon; a new channel may help in any case."""
        return await self._reconsider(managed)

    def close(self, managed: Managed) -> None:
        """Stop following the topology; the handler can only be closed with `close_async`."""
        self._stop()

    async def close_async(self, managed: Managed) -> None:
        """Stop following the topology, and close the handler."""
        self._stop()
        if (following := self._following) is not None:
            await asyncio.wait((following,))
        await awaited(managed.handler.close())


def _channel(config: ConnectionConfig) -> Any:
    from ._dial import make_channel

    return make_channel(config, next(_numbers))


def _aio_channel(config: ConnectionConfig) -> Any:
    from ._dial import make_aio_channel

    return make_aio_channel(config, next(_numbers))
