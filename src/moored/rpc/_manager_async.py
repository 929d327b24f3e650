"""The manager for asyncio: one shared connection for each endpoint and identity."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, ClassVar, Self

import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Clock

from ._background import AtOnce
from ._config import ConnectionConfig
from ._endpoint import Endpoint
from ._errors import ChannelError, no_config
from ._fork import refuse_broken
from ._gate import AsyncGate
from ._handler import AsyncHandler
from ._manager_base import ManagerBase
from ._manager_options import ManagerOptions
from ._strategies import AsyncGlobalStrategy, AsyncRegularStrategy

__all__ = ["AsyncConnectionManager"]


class AsyncConnectionManager(ManagerBase[AsyncHandler]):
    """Shares channels between clients, and reconnects them.

    `get_instance()` returns the manager of the running loop. Libraries and tests should create
    their own, with `async with AsyncConnectionManager(…) as manager:`. Options: see
    `ManagerOptions`.
    """

    _handler_type, _gate_type, _channel_type = AsyncHandler, AsyncGate, grpc.aio.Channel
    _regular, _moving = AsyncRegularStrategy, AsyncGlobalStrategy

    _instances: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    def __init__(self, **options: Any) -> None:
        checked = ManagerOptions.of(options)
        super().__init__(checked, checked.clock or Clock.current(), AtOnce())
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
        self._refuse_other_loops()
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if not dedicated:
            # The common case first: a connection that exists and was used recently.
            found: Endpoint | None = self._table.awake.get(config.key)
            if found is not None and found.hand_out(client, self._clock.monotonic()):
                handler: AsyncHandler = found.handler
                return handler
        return await self._obtain(config, dedicated, client, timeout, self._deadline(timeout))

    def open_channel(self, config: ConnectionConfig, client: object | None = None) -> AsyncHandler:
        """Return the channel to an endpoint at once; its first call connects.

        Until there is a connection, calls wait for it within their timeouts.
        """
        self._refuse_other_loops()
        return super().open_channel(config, client)

    def _refuse_other_loops(self) -> None:
        if self._loop() is not asyncio.get_running_loop():
            refuse_broken()
            raise ChannelError(
                "this manager belongs to another event loop: make one on this loop, or use "
                "get_instance(), which gives each loop its own"
            )

    async def release(self, handler: AsyncHandler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected."""
        gate = self._gate_of(handler)
        endpoint = gate.endpoint
        self._background.release(gate, client)
        if endpoint.closed:
            await self._background.closed(endpoint)

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

    def renew(self, handler: AsyncHandler) -> bool:
        """Make a new connection for new calls; those in flight go on over the present one.

        Return whether it is being made: not without a connection, nor within 5 s of the last time.
        """
        return self._background.renew(self._gate_of(handler).endpoint)

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
