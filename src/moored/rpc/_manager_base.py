"""The base of both managers: their connections, and the changes that calls and clients cause.

All of it runs on one event loop, which alone changes the state of a manager. How a change gets to
the loop, and how callers wait, differs between the two managers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import grpc  # type: ignore[import-untyped]

from moored.kernel import (
    Backoff,
    Clock,
    Deadline,
    Recorder,
    Tree,
    counted,
    describe,
    run_callback,
)

from ._background import Background
from ._config import ConnectionConfig
from ._connection_table import ConnectionTable
from ._core import Actions, ConnectionCore, ShellAct, ShellAction
from ._counters import Counters
from ._errors import ConfigError, ConnectFailed, ManagerClosed, no_channel, uncopied
from ._fork import refuse_broken
from ._managed import ManagedConnection
from ._manager_options import ManagerOptions, refused
from ._refusals import Refusals
from .topology._follower import Follower
from .topology._topology import Advice, Topology

__all__ = ["ManagerBase"]

H = TypeVar("H", bound=Any)


class ManagerBase(Generic[H]):
    """The common part of both managers."""

    _handler_type: ClassVar[type]
    _channel_type: ClassVar[type]
    #: The strategy classes: for a fixed server, and for a primary that may move.
    _regular: ClassVar[Callable[..., Any]]
    _moving: ClassVar[Callable[..., Any]]

    def __init__(self, policy: ManagerOptions, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self.recorder = policy.recorder or Recorder(clock=clock)
        self._table = ConnectionTable()
        self._closed = False
        self._background = self._new_background()

    def _new_background(self) -> Background:
        return Background(self._channel_type, self._policy, self._clock, self.recorder, self._table)

    def get_stats(self) -> dict[str, Any]:
        """Return the number of connections, the state of each, and the counters."""
        return self._table.statistics(self._clock.monotonic())

    def tree(self) -> Tree:
        """Return the supervised work: the sweeper, and the refreshers of topologies."""
        return self._background.tree()

    def _change(self, change: Callable[[], object]) -> None:
        """Make a change on the loop, now or soon."""
        raise NotImplementedError

    # -- waiting, on the loop ------------------------------------------------------------------

    def _deadline(self, timeout: float | None, default: float) -> Deadline:
        return Deadline.after(default if timeout is None else timeout, self._clock)

    async def _obtain(
        self,
        config: ConnectionConfig,
        dedicated: bool,
        client: object | None,
        timeout: float | None,
        deadline: Deadline,
    ) -> H:
        """Find or open a connection, and wait until it is usable."""
        managed: ManagedConnection[H] | None = None
        while True:
            if self._closed:
                raise ManagerClosed("the manager is closed: create a new one")
            refuse_broken()
            if managed is None or managed.core.closed:
                managed = self._find_or_open(config, dedicated, timeout)
            self._carry_out(managed, managed.requested(self._clock.monotonic()))
            if managed.core.usable:
                managed.taken(client)
                return managed.handler
            await self._wait(managed, deadline)

    async def _handle(
        self, handler: H, error: BaseException, timeout: float | None, generation: int | None
    ) -> bool:
        """See `handle_error` of both managers."""
        managed = self._known(handler, error)
        if isinstance(managed, bool):
            return managed
        limit = managed.connect_timeout if timeout is None else timeout
        if managed.handler._refusals is not None and refused(error):
            return bool(await run_callback(managed.handler._await_credentials, limit))
        if not self._policy.classify(error):
            return False
        # The handler has reported errors of gRPC already, with their generation.
        if generation is not None or not isinstance(error, grpc.RpcError):
            self._broken(managed, error, generation)
        return await self._recovered(managed, Deadline.after(limit, self._clock))

    async def _recovered(self, managed: ManagedConnection[H], deadline: Deadline) -> bool:
        """Wait for a new connection; return whether the caller may retry."""
        while not managed.core.usable and not managed.core.closed:
            try:
                await self._wait(managed, deadline)
            except ConnectFailed:
                return True
            except ConfigError:
                return False
        return not managed.core.closed

    async def _wait(self, managed: ManagedConnection[H], deadline: Deadline) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        managed.waiters.append(waiter)
        self._carry_out(managed, managed.core.wait(self._clock.monotonic()))
        try:
            async with asyncio.timeout(deadline.timeout):
                await waiter
        except TimeoutError:
            raise _unreached(managed) from managed.core.last_error
        finally:
            if waiter in managed.waiters:
                managed.waiters.remove(waiter)
                self._carry_out(managed, managed.core.leave(self._clock.monotonic()))

    def _carry_out(self, managed: ManagedConnection[H], actions: Actions) -> None:
        self._background.carry_out(managed, actions)

    # -- connections ---------------------------------------------------------------------------

    def _find_or_open(
        self, config: ConnectionConfig, dedicated: bool, timeout: float | None
    ) -> ManagedConnection[H]:
        found = None if dedicated else self._table.entries.get(config.key)
        if found is not None and not found.core.closed:
            return found
        key = self._table.dedicated_key(config.key) if dedicated else config.key
        # The short timeout of one caller must not shorten the attempts for later callers.
        limit = max(timeout or 0.0, self._policy.connect_timeout)
        handler = self._table.asleep.get(key) or self._new_handler(config)
        managed = self._manage(handler, config, key, dedicated, limit)
        if not managed.generation:  # one that was asleep starts its attempt when a caller waits
            self._carry_out(managed, managed.core.open(self._clock.monotonic()))
        return managed

    def _new_handler(self, config: ConnectionConfig) -> H:
        policy = self._policy
        handler: H = self._handler_type(
            address=config.address,
            credentials=policy.credentials(config),
            wait_limit=policy.connect_timeout,
            grace=policy.grace,
            now=self._clock.monotonic,
        )
        if getattr(handler._credentials, "refresh", None) is not None:
            handler._refusals = Refusals(Backoff(1.0, 60.0, jitter=0.25, clock=self._clock))
        return handler

    def _new_core(self, config: ConnectionConfig) -> ConnectionCore:
        return ConnectionCore(
            config.address,
            self._clock,
            self.recorder,
            idle=self._policy.idle,
            counters=self._table.counters.setdefault(config.address, Counters()),
        )

    def _manage(
        self, handler: H, config: ConnectionConfig, key: str, dedicated: bool, limit: float
    ) -> ManagedConnection[H]:
        managed = ManagedConnection(
            handler,
            config,
            None,
            self._new_core(config),
            key=key,
            dedicated=dedicated,
            connect_timeout=limit,
            created_at=self._clock.monotonic(),
        )
        self._give_strategy(managed)  # first: it may fail
        if handler._asleep is not None:
            managed.address = handler.address
            managed.core.inherited(handler._asleep, "a client calls over a closed channel")
            handler._asleep = None
        handler._on_rpc_error = lambda error, number: self._failed(managed, error, number)
        handler._on_waiting = lambda change: self._change(
            partial(self._count_waiting, handler, managed, change)
        )
        handler._on_close = lambda: self.release(handler)
        handler._on_unsent = lambda error: self._change(
            partial(self._background.unsent, managed, error)
        )
        handler._on_refused = lambda: self._change(
            partial(self._carry_out, managed, [ShellAction(ShellAct.REFRESH)])
        )
        self._table.add(managed)
        return managed

    def _give_strategy(self, managed: ManagedConnection[H]) -> None:
        strategy = managed.strategy = self._new_strategy(managed.config)
        if isinstance(strategy, Follower):
            strategy.on_change = lambda topology: self._moved(managed, topology)
            managed.handler._is_wanted = lambda address: strategy.advise(address) is not Advice.MOVE

    def _new_strategy(self, config: ConnectionConfig) -> Any:
        policy = self._policy
        if policy.strategy is not None:
            return policy.strategy(config)
        made = {"handler_factory": policy.handler_factory, "channels": policy.channels}
        if policy.fetch_topology is None and config.topology_source() is None:
            return self._regular(**made)
        return self._moving(
            **made,
            fetch_topology=policy.topology_source,
            clock=self._clock,
            recorder=self.recorder,
        )

    def release(self, handler: H, client: object | None = None) -> Any:
        """Return a channel."""
        raise NotImplementedError

    def _give_back(self, handler: H, client: object | None) -> None:
        managed = self._table.of(handler)
        if managed is None:
            self._table.end_asleep(handler)
            return
        managed.given_back(client)
        if managed.dedicated and managed.has_no_clients:
            self._background.close(managed, "it was released")

    def _end_all(self) -> None:
        for managed in self._table:
            self._background.close(managed, "everything is closed")
        for handler in list(self._table.asleep.values()):
            handler._shut()
        self._table.asleep.clear()

    def _check(self, handler: object) -> None:
        if not isinstance(handler, self._handler_type):
            raise no_channel(handler)

    def _known(self, handler: H, error: BaseException) -> ManagedConnection[H] | bool:
        """Return the connection of a handler; without one, whether a retry may open one."""
        self._check(handler)
        if (managed := self._table.of(handler)) is not None:
            return managed
        # A call over a handler that is asleep opens a connection.
        return handler._asleep is not None and self._policy.classify(error)

    # -- reports of handlers and strategies ----------------------------------------------------

    def _count_waiting(self, handler: H, known: ManagedConnection[H], change: int) -> None:
        managed = self._table.of(handler)
        if managed is None:
            if change < 0 or handler._asleep is None:
                return
            managed = self._wake(handler, known)
        now, core = self._clock.monotonic(), managed.core
        self._carry_out(managed, core.call_waits(now) if change > 0 else core.leave(now))

    def _wake(self, handler: H, known: ManagedConnection[H]) -> ManagedConnection[H]:
        """Create a connection for a handler that is asleep."""
        limit = known.connect_timeout
        try:
            return self._manage(handler, known.config, known.key, known.dedicated, limit)
        except Exception as error:
            failure = self._background.without_secrets(known, error).with_traceback(
                error.__traceback__
            )
        # Outside of the except clause: the error's context may repeat the token.
        handler._fail_waiting(failure)
        raise failure

    def _failed(self, managed: ManagedConnection[H], error: BaseException, generation: int) -> None:
        """Report the failed call of a generation."""
        if self._policy.classify(error):
            self._change(partial(self._broken, managed, error, generation))

    def _broken(
        self, managed: ManagedConnection[H], cause: BaseException, generation: int | None
    ) -> None:
        if generation is None:
            generation = managed.core.blamed(self._clock.monotonic())
        self._background.broken(managed, generation, cause)

    def _moved(self, managed: ManagedConnection[H], topology: Topology) -> None:
        why = f"version {topology.version} of the topology has another primary"
        self._background.moved(managed, why)

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._table), "connection")
        return f"<{type(self).__name__}: {state}>"


def _unreached(managed: ManagedConnection[Any]) -> ConnectFailed:
    """Return the error for a caller whose timeout has expired."""
    last = managed.core.last_error
    why = describe(last) if last is not None else managed.trouble or "the server does not answer"
    return ConnectFailed(f"no connection to {managed.config.address} in time: {why}")
