"""The manager for asyncio: one shared connection for each endpoint and identity."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Clock

from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._errors import ChannelError, no_config
from ._fork import refuse_broken
from ._handler_async import AsyncHandler
from ._managed import ManagedConnection
from ._manager_base import ManagerBase
from ._manager_options import ManagerOptions
from ._strategies import AsyncGlobalStrategy, AsyncRegularStrategy

__all__ = ["AsyncConnectionManager"]

Managed = ManagedConnection[AsyncHandler]


class AsyncConnectionManager(ManagerBase[AsyncHandler]):
    """Shares channels between clients, and reconnects them.

    `get_instance()` returns the manager of the running loop. Libraries and tests should create
    their own, with `async with AsyncConnectionManager(…) as manager:`. Options: see
    `ManagerOptions`.
    """

    _handler_type, _channel_type = AsyncHandler, grpc.aio.Channel
    _regular, _moving = AsyncRegularStrategy, AsyncGlobalStrategy

    _instances: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    def __init__(self, **options: Any) -> None:
        policy = ManagerOptions.of(options)
        super().__init__(policy, policy.clock or Clock.current())
        self._loop = weakref.ref(asyncio.get_running_loop())

    @classmethod
    def get_instance(cls) -> Self:
        """Return the manager of this class and the running loop; it is held weakly."""
        loop = asyncio.get_running_loop()
        found: Self | None = cls._instances.get(id(loop))
        # Another loop may have had the same id before.
        if found is None or found._closed or found._loop() is not loop:
            found = cls._instances[id(loop)] = cls()
        return found

    # -- for clients ---------------------------------------------------------------------------

    async def get_or_create(
        self,
        config: ConnectionConfig,
        dedicated: bool = False,
        client: object | None = None,
        timeout: float | None = None,
    ) -> AsyncHandler:
        """Return a connected channel to the endpoint, shared by all callers with the same key.

        :param dedicated: return a channel that is not shared, and is closed when it is released.
        :param client: the object that uses the channel, held weakly: when all clients of a channel
            are gone, it is closed after `linger` seconds.
        :param timeout: how long to wait for the connection, in seconds.
        """
        if self._loop() is not asyncio.get_running_loop():
            refuse_broken()
            raise ChannelError(
                "this manager belongs to another event loop: make one on this loop, or use "
                "get_instance(), which gives each loop its own"
            )
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if not dedicated:
            # The common case first: a connection that exists and was used recently.
            found: Managed | None = self._table.entries.get(config.key)
            if found is not None and found.hand_out(client, self._clock.monotonic()):
                return found.handler
        if client is not None:
            refuse_unreferable(client)
        deadline = self._deadline(timeout, self._policy.connect_timeout)
        return await self._obtain(config, dedicated, client, timeout, deadline)

    def open_channel(self, config: ConnectionConfig, client: object) -> AsyncHandler:
        """Return the channel to an endpoint at once, as `get_or_create` does when it is connected.

        Until then, and while there is no connection, calls wait for it within their timeouts.
        """
        managed = self._find_or_open(config, dedicated=False, timeout=None)
        managed.taken(client)
        managed.core.lasting = True
        return managed.handler

    async def release(self, handler: AsyncHandler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected."""
        self._check(handler)
        managed = self._table.of(handler)
        self._give_back(handler, client)
        if managed is not None:
            await self._background.closed(managed)

    async def handle_error(
        self,
        handler: AsyncHandler,
        error: BaseException,
        timeout: float | None = None,
        generation: int | None = None,
    ) -> bool:
        """Report a failed call: open a new connection if that may help, and wait for it.

        :param generation: the handler's `generation` before the call, for an error that is not
            gRPC's own: an error of an old generation changes nothing. Without it, an error within
            5 s of a new generation counts as one of the generation before.

        Return whether the caller may retry, within its own timeout. After UNAVAILABLE over a
        connection that still seems alive, it returns True at once, while the manager checks for a
        few milliseconds whether the connection was lost. If the server has refused the credentials,
        they are refreshed, once for all callers, and the connection is kept: the caller may retry
        unless the new credentials were refused as well.
        """
        return await self._handle(handler, error, timeout, generation)

    async def close_all(self) -> None:
        """Close all connections when their calls have ended, and wait for that."""
        self._end_all()
        await self._background.drained()

    async def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._closed = True
        await self.close_all()
        await self._background.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _change(self, change: Callable[[], object]) -> None:
        change()
