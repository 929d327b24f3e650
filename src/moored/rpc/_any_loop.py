"""A `grpc.aio.Channel` that needs no event loop to be made, and works on any loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import grpc.aio  # type: ignore[import-untyped]

from ._config import ConnectionConfig
from ._endpoint import Endpoint
from ._handler import AsyncHandler
from ._manager_async import AsyncConnectionManager
from .calls._kinds import FourKinds

__all__ = ["AnyLoopChannel"]


class AnyLoopChannel(FourKinds, grpc.aio.Channel):  # type: ignore[misc]
    """A channel to a server; each loop that calls over it has a connection of its own.

    The connection belongs to the manager of the loop, and is opened by the first call, which waits
    for it within its timeout. `client` is as for `get_or_create`.
    """

    def __init__(self, config: ConnectionConfig, client: object | None = None) -> None:
        self.config = config
        self._client = client
        self._handlers: dict[asyncio.AbstractEventLoop, AsyncHandler] = {}

    @property
    def current(self) -> AsyncHandler:
        """The channel of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._handlers.get(loop)
        if found is None or found.endpoint.closed:
            found = AsyncConnectionManager.get_instance().open_channel(self.config, self._client)
            for other in list(self._handlers):
                if other.is_closed():
                    self._handlers.pop(other, None)
            self._handlers[loop] = found
        return found

    @property
    def endpoint(self) -> Endpoint:
        """The state of the connection of the running loop."""
        return self.current.endpoint

    @property
    def generation(self) -> int:
        """The number of the current connection of the running loop; 0 while there is none."""
        return self.current.generation

    @property
    def address(self) -> str:
        """The address of its current, or else of its last, connection."""
        return self.current.address

    def _method(self, kind: str, *given: Any, **named: Any) -> Callable[..., Any]:
        # Weakly: a handler is garbage with its loop.
        made: WeakKeyDictionary[AsyncHandler, Callable[..., Any]] = WeakKeyDictionary()

        def call(*args: Any, **options: Any) -> Any:
            current = self.current
            if (method := made.get(current)) is None:
                method = made[current] = getattr(current, kind)(*given, **named)
            return method(*args, **options)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection."""
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until `get_state` differs."""
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        await self.current.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Release the channel of the running loop; another call opens it again."""
        if (found := self._handlers.pop(asyncio.get_running_loop(), None)) is not None:
            await found.close(grace)

    async def __aenter__(self) -> AnyLoopChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.config.address}>"
