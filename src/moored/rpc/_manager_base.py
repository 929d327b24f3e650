"""The base of both managers: find or open an endpoint, wait for it, and report errors by hand.

All of it runs on one event loop, which alone changes the state of a manager. How a change gets to
the loop, and how callers wait, differs between the two managers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, Deadline, Machine, Recorder, Tree, counted, run_callback

from ._background import Background, Posting
from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._counters import Counters
from ._dial import refused
from ._endpoint import Endpoint
from ._errors import ConfigError, ConnectFailed, ManagerClosed, no_channel, no_config, uncopied
from ._fork import refuse_broken
from ._manager_options import RENEW, ManagerOptions
from ._table import Table

__all__ = ["ManagerBase"]

H = TypeVar("H", bound=Any)


class ManagerBase(Generic[H]):
    """The common part of both managers."""

    _handler_type: ClassVar[Callable[..., Any]]
    _gate_type: ClassVar[Callable[..., Any]]
    _channel_type: ClassVar[type]
    #: The strategy classes: for a fixed server, and for a primary that may move.
    _regular: ClassVar[Callable[..., Any]]
    _moving: ClassVar[Callable[..., Any]]

    def __init__(self, options: ManagerOptions, clock: Clock, posting: Posting) -> None:
        self._options = options
        self._clock = clock
        self._posting = posting
        self.recorder = options.recorder or Recorder(clock=clock)
        self._table = Table()
        self._closed = False
        self._background = self._new_background()

    def _new_background(self) -> Background:
        return Background(
            self._channel_type,
            self._options,
            self._clock,
            self.recorder,
            self._table,
            self._posting,
            self._new_strategy,
        )

    def get_stats(self) -> dict[str, Any]:
        """Return the number of connections, the state of each, and the counters."""
        return self._table.statistics(self._clock.monotonic())

    def link_machines(self) -> list[tuple[str, str, Machine]]:
        """Return the state machine of each connection, for `LinksCollector`."""
        return [("rpc", each.config.address, each.machine) for each in self._table]

    def tree(self) -> Tree:
        """Return the supervised work: the sweeper, and the refreshers of topologies."""
        return self._background.tree()

    def open_channel(self, config: ConnectionConfig, client: object | None = None) -> H:
        """Return the channel to an endpoint at once; its first call connects.

        Until there is a connection, calls wait for it within their timeouts. It needs no event
        loop and starts no thread, so it may be called when a module is imported.
        """
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if self._closed:
            raise _closed()
        while True:
            endpoint = self._table.find_or_make(config.key, lambda: self._new_endpoint(config))
            endpoint.taken(client)
            if self._is_closed():  # meanwhile, by another thread
                self._posting.post(
                    partial(self._background.close, endpoint, "everything is closed")
                )
                raise _closed()
            if not endpoint.closed:  # as an attempt that its last caller has left
                handler: H = endpoint.handler
                return handler

    # -- waiting, on the loop ------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> Deadline:
        limit = self._options.connect_timeout if timeout is None else timeout
        return Deadline.after(limit, self._clock)

    async def _obtain(
        self,
        config: ConnectionConfig,
        dedicated: bool,
        client: object | None,
        timeout: float | None,
        deadline: Deadline,
    ) -> H:
        """Find or open a connection, and wait until it is usable."""
        if client is not None:
            refuse_unreferable(client)
        endpoint: Endpoint | None = None
        while True:
            if self._closed:
                raise _closed()
            refuse_broken()
            if endpoint is None or endpoint.closed:
                endpoint = self._find_or_open(config, dedicated, timeout)
            self._background.requested(endpoint)
            if endpoint.usable:
                endpoint.taken(client)
                handler: H = endpoint.handler
                return handler
            await self._background.wait(endpoint, deadline)

    async def _handle(
        self, handler: H, error: BaseException, timeout: float | None, generation: int | None
    ) -> bool:
        """See `handle_error` of both managers."""
        gate = self._gate_of(handler)
        endpoint = gate.endpoint
        if endpoint.closed:
            return False
        if endpoint.refusals is not None and refused(error):
            limit = endpoint.connect_timeout if timeout is None else timeout
            return bool(await run_callback(gate.await_credentials, limit))
        if not (what := self._options.classify(error)):
            return False
        # The channel has reported errors of gRPC already, with their generation.
        if generation is not None or not isinstance(error, grpc.RpcError):
            self._background.broken(endpoint, generation, error, renew=what == RENEW)
        return await self._recovered(endpoint, timeout)

    async def _recovered(self, endpoint: Endpoint, timeout: float | None) -> bool:
        """Wait for a new connection; return whether the caller may retry."""
        limit = endpoint.connect_timeout if timeout is None else timeout
        deadline = Deadline.after(limit, self._clock)
        while endpoint.is_being_replaced or not (
            endpoint.usable or endpoint.closed or endpoint.resting
        ):
            try:
                await self._background.wait(endpoint, deadline)
            except ConnectFailed:
                return True
            except ConfigError:
                return False
        return not endpoint.closed

    # -- endpoints -----------------------------------------------------------------------------

    def _find_or_open(
        self, config: ConnectionConfig, dedicated: bool, timeout: float | None
    ) -> Endpoint:
        key = self._table.dedicated_key(config.key) if dedicated else config.key
        # The short timeout of one caller must not shorten the attempts for later callers.
        limit = max(timeout or 0.0, self._options.connect_timeout)
        endpoint = self._table.find_or_make(
            key, lambda: self._new_endpoint(config, key=key, dedicated=dedicated, limit=limit)
        )
        if endpoint.strategy is None:
            self._background.give_strategy(endpoint)
        return endpoint

    def _new_endpoint(
        self,
        config: ConnectionConfig,
        *,
        key: str | None = None,
        dedicated: bool = False,
        limit: float | None = None,
    ) -> Endpoint:
        options = self._options
        credentials = options.credentials(config)
        endpoint = Endpoint(
            config,
            self._clock,
            self.recorder,
            key=key or config.key,
            dedicated=dedicated,
            limit=options.connect_timeout if limit is None else limit,
            counters=self._table.counters.setdefault(config.address, Counters()),
            refreshable=getattr(credentials, "refresh", None) is not None,
            idle=options.idle,
            grace=options.grace,
            max_age=options.max_age,
        )
        gate = self._gate_type(
            endpoint,
            self._background,
            credentials=credentials,
            wait_limit=options.connect_timeout,
            now=self._clock.monotonic,
        )
        endpoint.shown_as(self._handler_type(gate))
        return endpoint

    def _new_strategy(self, endpoint: Endpoint) -> Any:
        options, config = self._options, endpoint.config
        if options.strategy is not None:
            return options.strategy(config)
        made = {"handler_factory": options.handler_factory, "channels": options.channels}
        if options.fetch_topology is None and config.topology_source() is None:
            return self._regular(**made)
        return self._moving(
            **made,
            fetch_topology=options.topology_source,
            clock=self._clock,
            recorder=self.recorder,
        )

    def _gate_of(self, handler: Any) -> Any:
        handler = getattr(handler, "current", handler)  # of a channel for any loop
        if not isinstance(handler, self._handler_type):  # type: ignore[arg-type]
            raise no_channel(handler)
        return handler.gate

    def _is_closed(self) -> bool:
        return self._closed

    def _end_all(self) -> None:
        for endpoint in self._table.all():
            self._background.close(endpoint, "everything is closed")

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._table), "connection")
        return f"<{type(self).__name__}: {state}>"


def _closed() -> ManagerClosed:
    return ManagerClosed("the manager is closed: create a new one")
