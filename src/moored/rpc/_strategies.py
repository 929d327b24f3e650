"""Strategies: how channels are made, for one server, and for a primary that may move.

A strategy belongs to one connection. It makes the channel of each generation (`create_handler`),
decides in an outage whether a new channel may help (`on_unavailable`), and is closed with the
connection, or while that rests (`close`). It never holds a lock while it waits.

The global strategies follow a topology. The async `Follower` serves both: it runs on the user's own
loop, or on the private loop thread.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from inspect import iscoroutinefunction
from typing import Any

from moored.kernel import LoopThread, awaited

from ._channel_pool import Factory, pooled, pooled_async
from ._config import ConnectionConfig
from ._dial import make_aio_channel, make_channel
from ._fork import inside
from .topology._follower import Follower, HandlerFactory, Managed

# A unique number for each channel of the process, so that no two share a connection.
_numbers = itertools.count(1)


class ConnectionStrategy(ABC):
    """Makes the channels of one connection; its methods may be plain or async."""

    #: The address of the last channel; None if it is the configuration's.
    address: str | None = None
    #: Whether `on_unavailable` always returns True: the channel is then dropped before the query,
    #: so that calls wait for a new one at once.
    always_recovers = False

    @abstractmethod
    def create_handler(self, config: ConnectionConfig) -> Any:
        """Return a channel for a new generation."""

    @abstractmethod
    def on_unavailable(self, managed: Managed) -> bool | Awaitable[bool]:
        """Return whether a new channel may help, when the server is unreachable.

        If False, the channel is kept, unless it was dropped already (see `always_recovers`).
        """

    def renews(self, error: BaseException) -> bool:
        """Return whether a channel over a live connection should be replaced after this error."""
        return False

    @abstractmethod
    def close(self, managed: Managed) -> None:
        """Free what the strategy holds; the manager closes the channels."""

    async def close_async(self, managed: Managed) -> None:
        """Free what the strategy holds, on an event loop."""
        self.close(managed)


class RegularStrategy(ConnectionStrategy):
    """Makes channels to one server, which may restart.

    :param handler_factory: makes a channel; by default gRPC's own.
    :param channels: the number of channels to use as one, for a server that limits the calls of
        each.
    """

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled(handler_factory or _channel, channels)

    def create_handler(self, config: ConnectionConfig) -> Any:
        """Return a channel to the server."""
        return _made(self._factory, config)

    def on_unavailable(self, managed: Managed) -> bool:
        """Return True: a new channel does not inherit the backoff of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Do nothing: it holds nothing."""


class AsyncRegularStrategy(ConnectionStrategy):
    """Makes channels to one server, which may restart; for asyncio, with the same parameters."""

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled_async(handler_factory or _aio_channel, channels)

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """Return a channel to the server."""
        return await awaited(self._factory(config))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Return True: a new channel does not inherit the backoff of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Do nothing: it holds nothing."""


class GlobalStrategy(Follower, ConnectionStrategy):
    __doc__ = f"Makes channels to a primary that may move; for threads.\n{Follower.__doc__}"

    def create_handler(self, config: ConnectionConfig) -> Any:
        """Return a channel to the chosen member; fetch the topology first if none is known."""
        target = LoopThread.shared().run(self._locate(config))
        return _made(pooled(self._factory or _channel, self._channels), target)

    def on_unavailable(self, managed: Managed) -> bool:
        """Fetch the topology, if possible soon, and return whether a new channel may help."""
        return LoopThread.shared().run(self._reconsider(managed))

    def close(self, managed: Managed) -> None:
        """Stop following the topology."""
        self._stop()


class AsyncGlobalStrategy(Follower, ConnectionStrategy):
    __doc__ = f"Makes channels to a primary that may move; for asyncio.\n{Follower.__doc__}"

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """Return a channel to the chosen member; fetch the topology first if none is known."""
        target = await self._locate(config)
        make = pooled_async(self._factory or _aio_channel, self._channels)
        return await awaited(make(target))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Fetch the topology, if possible soon, and return whether a new channel may help."""
        return await self._reconsider(managed)

    def close(self, managed: Managed) -> None:
        """Stop following the topology."""
        self._stop()

    async def close_async(self, managed: Managed) -> None:
        """Stop following the topology, and wait until its task has ended."""
        self._stop()
        if self._refresher is not None:
            await asyncio.wait([self._refresher.task])


def _made(factory: Factory, config: ConnectionConfig) -> Any:
    """Return the channel of a factory, or an awaitable of it if the factory is async."""
    if iscoroutinefunction(factory):
        return _made_later(factory, config)
    with inside():
        return factory(config)


async def _made_later(factory: Factory, config: ConnectionConfig) -> Any:
    with inside():  # it may call the server
        return await factory(config)


def _channel(config: ConnectionConfig) -> Any:
    return make_channel(config, next(_numbers))


def _aio_channel(config: ConnectionConfig) -> Any:
    return make_aio_channel(config, next(_numbers))
