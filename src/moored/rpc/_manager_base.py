"""The base of both managers: their connections, and the events that change these.

An event is a function that changes the state of a manager and returns the actions to carry out. How
events run, and how callers wait, differs between the two managers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, Deadline, Recorder, counted, describe

from ._background import Background
from ._changes import Work
from ._channels import Channels
from ._config import ConnectionConfig
from ._connection_table import ConnectionTable
from ._core import Actions, ShellAct, ShellAction
from ._errors import ConfigError, ConnectFailed, ManagerClosed, no_channel, uncopied
from ._fork import refuse_broken
from ._managed import ManagedConnection
from ._manager_options import ManagerOptions
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

    _background: Background
    _lock: AbstractContextManager[Any]

    def __init__(self, policy: ManagerOptions, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self.recorder = policy.recorder or Recorder(clock=clock)
        self._table = ConnectionTable()
        self._closed = False

    def _new_background(self) -> Background:
        return Background(
            self._lock,
            Channels(self._channel_type, self._policy.probe),
            policy=self._policy,
            clock=self._clock,
            recorder=self.recorder,
            table=self._table,
        )

    def get_stats(self) -> dict[str, Any]:
        """Return the number of connections, the state of each, and the counters."""
        with self._lock:
            return self._table.statistics(self._clock.monotonic())

    def _change(self, change: Callable[[], Work]) -> None:
        """Run an event, and carry out the actions that follow from it."""
        raise NotImplementedError

    def _carry_out(self, work: Work) -> None:
        """Carry out the actions that follow from an event; on the loop."""
        for managed, actions in work:
            self._background.carry_out(managed, actions)
        self._background.watch()

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
            with self._lock:
                if self._closed:
                    raise ManagerClosed("the manager is closed: create a new one")
                refuse_broken()
                actions: Actions = []
                if managed is None or managed.core.closed:
                    managed, actions = self._find_or_open(config, dedicated, timeout)
                actions = [*actions, *managed.requested(self._clock.monotonic())]
                if managed.core.usable:
                    managed.taken(client)
                    return managed.handler
            self._carry_out([(managed, actions)])
            await self._wait(managed, deadline)

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
        with self._lock:
            managed.waiters.append(waiter)
            actions = managed.core.wait(self._clock.monotonic())
            left = deadline.timeout
        self._carry_out([(managed, actions)])
        try:
            async with asyncio.timeout(left):
                await waiter
        except TimeoutError:
            raise _unreached(managed) from managed.core.last_error
        finally:
            actions = []
            with self._lock:
                if waiter in managed.waiters:
                    managed.waiters.remove(waiter)
                    actions = managed.core.leave(self._clock.monotonic())
            self._carry_out([(managed, actions)])

    # -- connections ---------------------------------------------------------------------------

    def _find_or_open(
        self, config: ConnectionConfig, dedicated: bool, timeout: float | None
    ) -> tuple[ManagedConnection[H], Actions]:
        found = None if dedicated else self._table.entries.get(config.key)
        if found is not None and not found.core.closed:
            return found, []
        key = self._table.dedicated_key(config.key) if dedicated else config.key
        # The short timeout of one caller must not shorten the attempts for later callers.
        limit = max(timeout or 0.0, self._policy.connect_timeout)
        handler = self._table.asleep.get(key) or self._new_handler(config)
        managed = self._manage(handler, config, key, dedicated, limit)
        # A connection that was asleep starts its attempt when a caller waits.
        fresh = not managed.generation
        return managed, managed.core.open(self._clock.monotonic()) if fresh else []

    def _new_handler(self, config: ConnectionConfig) -> H:
        policy = self._policy
        handler: H = self._handler_type(
            address=config.address,
            credentials=policy.credentials(config),
            wait_limit=policy.connect_timeout,
            grace=policy.grace,
            now=self._clock.monotonic,
        )
        handler._refusals = policy.refusals(handler._credentials, self._clock)
        return handler

    def _manage(
        self, handler: H, config: ConnectionConfig, key: str, dedicated: bool, limit: float
    ) -> ManagedConnection[H]:
        managed = ManagedConnection(
            handler,
            config,
            None,
            self._policy.core(
                config, self._clock, self.recorder, self._table.counters_of(config.address)
            ),
            key=key,
            dedicated=dedicated,
            created_at=self._clock.monotonic(),
            connect_timeout=limit,
        )
        self._give_strategy(managed)  # first: it may fail
        if handler._asleep is not None:
            managed.address = handler.address
            managed.core.inherited(handler._asleep, "a client calls over a closed channel")
            handler._asleep = None
        managed.detach = lambda: self._detach(managed)
        handler._on_rpc_error = lambda error, number: self._may_recover(managed, error, number)
        handler._on_waiting = lambda change: self._change(
            partial(self._count_waiting, handler, managed, change)
        )
        handler._on_close = lambda: self.release(handler)
        handler._on_unsent = lambda error: self._change(
            lambda: self._background.unsent(managed, error)
        )
        handler._on_refused = lambda: self._change(
            lambda: [(managed, [ShellAction(ShellAct.REFRESH)])]
        )
        self._table.add(managed)
        return managed

    def _give_strategy(self, managed: ManagedConnection[H]) -> None:
        strategy = managed.strategy = self._policy.strategy_of(
            managed.config, self._regular, self._moving, self._clock, self.recorder
        )
        if isinstance(strategy, Follower):
            strategy.on_change = lambda topology: self._moved(managed, topology)
            managed.handler._is_wanted = lambda address: strategy.advise(address) is not Advice.MOVE

    def _detach(self, managed: ManagedConnection[H]) -> bool:
        return self._table.detach(managed)

    def release(self, handler: H, client: object | None = None) -> Any:
        """Return a channel."""
        raise NotImplementedError

    def _give_back(self, handler: H, client: object | None) -> Work:
        managed = self._table.of(handler)
        if managed is None:
            if not isinstance(handler, self._handler_type):
                raise no_channel(handler)
            self._table.end_asleep(handler)
            return []
        managed.given_back(client)
        over = managed.dedicated and managed.has_no_clients
        return [self._end(managed, "it was released")] if over else []

    def _end_all(self) -> Work:
        # All at once, so that their calls end at the same time.
        work = [self._end(managed, "everything is closed") for managed in self._table]
        for handler in list(self._table.asleep.values()):
            handler._shut()
        self._table.asleep.clear()
        return work

    def _end(self, managed: ManagedConnection[H], why: str) -> tuple[ManagedConnection[H], Actions]:
        actions = managed.core.close(why)
        # At once, so that a concurrent close finds the handler closed.
        self._background.shut(managed)
        self._table.remove(managed)
        return managed, actions

    def _known(self, handler: H, error: BaseException) -> ManagedConnection[H] | bool:
        """Return the connection of a handler; without one, whether a retry may open one."""
        managed = self._table.of(handler)
        if managed is not None:
            return managed
        if not isinstance(handler, self._handler_type):
            raise no_channel(handler)
        # A call over a handler that is asleep opens a connection.
        asleep: bool = handler._asleep is not None  # type: ignore[attr-defined]
        return asleep and self._policy.classify(error)

    def _may_recover(
        self, managed: ManagedConnection[H], error: BaseException, generation: int | None
    ) -> bool:
        """Report an error to the core; return whether a new connection may help."""
        if not self._policy.classify(error):
            return False
        if generation is not None or not isinstance(error, grpc.RpcError):
            # The handler has reported errors of gRPC already, with their generation.
            self._broken(managed, error, generation)
        return True

    # -- events --------------------------------------------------------------------------------

    def _count_waiting(self, handler: H, known: ManagedConnection[H], change: int) -> Work:
        managed = self._table.of(handler)
        if managed is None:
            if change < 0 or handler._asleep is None:
                return []
            managed = self._wake(handler, known)
        now, core = self._clock.monotonic(), managed.core
        return [(managed, core.call_waits(now) if change > 0 else core.leave(now))]

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

    def _broken(
        self, managed: ManagedConnection[H], cause: BaseException | str, generation: int | None
    ) -> None:
        def broken() -> Work:
            known = generation
            if known is None:
                known = managed.core.blamed(self._clock.monotonic())
            return [(managed, self._background.broken(managed, known, cause))]

        self._change(broken)

    def _moved(self, managed: ManagedConnection[H], topology: Topology) -> None:
        why = f"version {topology.version} of the topology has another primary"
        self._change(lambda: [(managed, self._background.moved(managed, why))])

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._table), "connection")
        return f"<{type(self).__name__}: {state}>"


def _unreached(managed: ManagedConnection[Any]) -> ConnectFailed:
    """Return the error for a caller whose timeout has expired."""
    last = managed.core.last_error
    why = describe(last) if last is not None else managed.trouble or "it does not answer"
    return ConnectFailed(f"no connection to {managed.config.address} in time: {why}")
