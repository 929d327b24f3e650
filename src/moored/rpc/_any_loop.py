"""A `grpc.aio.Channel` that needs no event loop to be made, and works on any loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio  # type: ignore[import-untyped]

from ._config import ConnectionConfig
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
        self._found: tuple[asyncio.AbstractEventLoop, AsyncHandler] | None = None

    @property
    def current(self) -> AsyncHandler:
        """The channel of the running loop."""
        loop, found = asyncio.get_running_loop(), self._found
        if found is None or found[0] is not loop or found[1].endpoint.closed:
            manager = AsyncConnectionManager.get_instance()
            found = self._found = loop, manager.open_channel(self.config, self._client)
        return found[1]

    def _method(self, kind: str, *given: Any, **named: Any) -> Callable[..., Any]:
        made: tuple[AsyncHandler, Callable[..., Any]] | None = None

        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            current = self.current
            if made is None or made[0] is not current:
                made = current, getattr(current, kind)(*given, **named)
            return made[1](*args, **options)

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
        found, self._found = self._found, None
        if found is not None and found[0] is asyncio.get_running_loop():
            await found[1].close(grace)

    async def __aenter__(self) -> AnyLoopChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.config.address}>"
