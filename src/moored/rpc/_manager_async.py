"""The manager for asyncio: one connection for each endpoint and identity, recovered once."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, Deadline, Recorder, counted, describe

from ._book import Book
from ._channels import AioChannels
from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._core import Act, Action, Actions
from ._errors import (
    ChannelError,
    ConfigError,
    ConnectFailed,
    ManagerClosed,
    no_channel,
    no_config,
    uncopied,
)
from ._fork import refuse_broken
from ._handler_async import AsyncHandler
from ._managed import ManagedConnection
from ._policy import Policy, refused
from ._strategies import AsyncGlobalStrategy, AsyncRegularStrategy
from ._topology import Topology
from ._works import Works

__all__ = ["AsyncConnectionManager"]

Managed = ManagedConnection[AsyncHandler]


class AsyncConnectionManager:
    """Shares channels between clients, and keeps them alive.

    `get_instance()` is the one of the running loop; one of your own, `AsyncConnectionManager(…)`
    in an `async with`, is better for libraries and tests. For its options see `Policy`.
    """

    _instances: ClassVar[weakref.WeakValueDictionary[int, AsyncConnectionManager]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, **options: Any) -> None:
        self._policy = policy = Policy.of(options)
        self._clock = policy.clock or Clock.current()
        self.recorder = policy.recorder or Recorder(clock=self._clock)
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._book = Book()
        self._closed = False
        self._works = Works(
            contextlib.nullcontext(),
            AioChannels(policy),
            policy=policy,
            clock=self._clock,
            recorder=self.recorder,
            book=self._book,
        )

    @classmethod
    def get_instance(cls) -> AsyncConnectionManager:
        """The manager of the running loop; it goes when nobody has it or a channel of it."""
        loop = asyncio.get_running_loop()
        found = cls._instances.get(id(loop))
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
        """A channel to the endpoint, connected; the same for all who may share it.

        :param dedicated: one that nobody else gets; it is closed when it is released.
        :param client: who uses it, held weakly: when all of them are gone, it is closed after a
            while.
        :param timeout: how long to wait for it.
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
            # The common case, first: it is there, and was used lately.
            found: Managed | None = self._book.entries.get(config.key)
            if found is not None and found.hand_out(client, self._clock.monotonic()):
                return found.handler
        if client is not None:
            refuse_unreferable(client)
        limit = self._policy.connect_timeout if timeout is None else timeout
        deadline = Deadline.after(limit, self._clock)
        managed: Managed | None = None
        while True:
            if self._closed:
                raise ManagerClosed("the manager is closed: make a new one")
            refuse_broken()
            if managed is None or managed.core.closed:
                managed = self._find_or_open(config, dedicated, timeout)
            self._carry_out(managed, managed.come(self._clock.monotonic()))
            if managed.core.usable:
                managed.taken(client)
                return managed.handler
            await self._wait(managed, deadline)

    async def release(self, handler: AsyncHandler, client: object | None = None) -> None:
        """The client does not need it any more; others who share it are not touched."""
        managed = self._book.of(handler)
        if managed is None:
            if not isinstance(handler, AsyncHandler):
                raise no_channel(handler)
            self._book.end_asleep(handler)
            return
        managed.given_back(client)
        if managed.dedicated and managed.deserted:
            self._carry_out(managed, managed.core.close("it was released"))
            await self._works.closed(managed)

    async def handle_error(
        self,
        handler: AsyncHandler,
        error: BaseException,
        timeout: float | None = None,
        generation: int | None = None,
    ) -> bool:
        """A call failed: see to a new connection, if that may help, and wait for it.

        :param generation: the handler's, from before the call, for an error that is not gRPC's own:
            one of an old generation changes nothing. Without it, one that comes within 5 s of a new
            generation is taken for late.

        Returns whether the caller may try again, which is so until its own time is over. If the
        server has refused the credentials, they are refreshed, once for all callers, and the
        connection is kept: then it may try again unless the new ones were refused as well.
        """
        managed: Managed | None = self._book.of(handler)
        if managed is None:
            if not isinstance(handler, AsyncHandler):
                raise no_channel(handler)
            # A call over one that is asleep opens a connection.
            return handler._asleep is not None and self._policy.classify(error)
        limit = managed.connect_timeout if timeout is None else timeout
        if managed.handler._refusals is not None and refused(error):
            return await managed.handler._await_credentials(limit)
        if not self._policy.classify(error):
            return False
        if generation is not None or not isinstance(error, grpc.RpcError):
            # Those of gRPC were told by the handler, with the generation that they came from.
            self._broken(managed, error, generation)
        deadline = Deadline.after(limit, self._clock)
        while not managed.core.usable and not managed.core.closed:
            try:
                await self._wait(managed, deadline)
            except ConnectFailed:
                return True
            except ConfigError:
                return False
        return not managed.core.closed

    async def close_all(self) -> None:
        """Close all connections, when the calls over them have ended."""
        # All first: while the calls over one end, so do those over the others.
        for managed in self._book:
            self._carry_out(managed, managed.core.close("everything is closed"))
        for handler in list(self._book.asleep.values()):
            handler._shut()
        self._book.asleep.clear()
        await self._works.drained()

    def get_stats(self) -> dict[str, Any]:
        """What there is: how many connections, and each with its state."""
        return self._book.statistics(self._clock.monotonic())

    async def close(self) -> None:
        """Close all connections, and take no more."""
        self._closed = True
        await self.close_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- connections ---------------------------------------------------------------------------

    def _find_or_open(
        self, config: ConnectionConfig, dedicated: bool, timeout: float | None
    ) -> Managed:
        found = None if dedicated else self._book.entries.get(config.key)
        if found is not None and not found.core.closed:
            return found
        managed = self._new(config, dedicated, timeout)
        if not managed.generation:  # the others do so as soon as somebody waits
            self._carry_out(managed, managed.core.open(self._clock.monotonic()))
        return managed

    def _new(self, config: ConnectionConfig, dedicated: bool, timeout: float | None) -> Managed:
        key = self._book.dedicated_key(config.key) if dedicated else config.key
        # A caller in a hurry must not leave those who come after it with attempts too short.
        limit = max(timeout or 0.0, self._policy.connect_timeout)
        found = self._book.asleep.get(key)
        return self._manage(found or self._new_handler(config), config, key, dedicated, limit)

    def _new_handler(self, config: ConnectionConfig) -> AsyncHandler:
        policy = self._policy
        handler = AsyncHandler(
            address=config.address,
            credentials=policy.credentials(config),
            wait_limit=policy.connect_timeout,
            grace=policy.grace,
            now=self._clock.monotonic,
        )
        handler._refusals = policy.refusals(handler._credentials, self._clock)
        return handler

    def _manage(
        self,
        handler: AsyncHandler,
        config: ConnectionConfig,
        key: str,
        dedicated: bool,
        limit: float,
    ) -> Managed:
        policy, clock = self._policy, self._clock
        managed = ManagedConnection(
            handler,
            config,
            policy.strategy_of(
                config, AsyncRegularStrategy, AsyncGlobalStrategy, clock, self.recorder
            ),
            policy.core(config, clock, self.recorder, self._book.counters_of(config.address)),
            key=key,
            dedicated=dedicated,
            created_at=clock.monotonic(),
            connect_timeout=limit,
        )
        if handler._asleep is not None:
            managed.address = handler.address
            managed.core.inherited(handler._asleep, "somebody holds the channel, and wants it")
            handler._asleep = None
        managed.part = lambda: self._book.part(managed)
        handler._on_rpc_error = lambda error, number: self._failed(managed, error, number)
        handler._on_waiting = lambda change: self._calls_wait(handler, managed, change)
        handler._on_close = lambda: self.release(handler)
        handler._on_unsent = lambda error: self._unsent(managed, error)
        handler._on_refused = lambda: self._refused(managed)
        if isinstance(managed.strategy, AsyncGlobalStrategy):
            managed.strategy.on_change = lambda topology: self._moved(managed, topology)
        self._book.add(managed)
        self._works.watch()
        return managed

    # -- waiting -------------------------------------------------------------------------------

    async def _wait(self, managed: Managed, deadline: Deadline) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        managed.waiters.append(waiter)
        self._carry_out(managed, managed.core.wait(self._clock.monotonic()))
        try:
            async with asyncio.timeout(deadline.timeout):
                await waiter
        except TimeoutError:
            raise unreached(managed) from managed.core.last_error
        finally:
            if waiter in managed.waiters:
                managed.waiters.remove(waiter)
                self._carry_out(managed, managed.core.leave(self._clock.monotonic()))

    def _calls_wait(self, handler: AsyncHandler, known: Managed, change: int) -> None:
        managed = self._book.of(handler)
        if managed is None:
            if change < 0 or handler._asleep is None:
                return
            managed = self._wake(handler, known)
        now, core = self._clock.monotonic(), managed.core
        self._carry_out(managed, core.call_waits(now) if change > 0 else core.leave(now))

    def _wake(self, handler: AsyncHandler, known: Managed) -> Managed:
        """Open a connection for one that was closed because nobody seemed to have it."""
        limit = known.connect_timeout
        try:
            return self._manage(handler, known.config, known.key, known.dedicated, limit)
        except Exception as error:
            told = self._works.harmless(known, error).with_traceback(error.__traceback__)
        # Not in the handler: the error that it handles may repeat the token.
        handler._fail_waiting(told)
        raise told

    # -- errors --------------------------------------------------------------------------------

    def _failed(self, managed: Managed, error: BaseException, generation: int) -> None:
        if self._policy.classify(error):
            self._broken(managed, error, generation)

    def _broken(self, managed: Managed, cause: BaseException | str, generation: int | None) -> None:
        if generation is None:
            generation = managed.core.blamed(self._clock.monotonic())
        self._carry_out(managed, self._works.broken(managed, generation, cause))

    def _unsent(self, managed: Managed, error: BaseException) -> None:
        self._works.unsent(managed, error)

    def _refused(self, managed: Managed) -> None:
        self._carry_out(managed, [Action(Act.REFRESH)])

    def _moved(self, managed: Managed, topology: Topology) -> None:
        self._carry_out(managed, self._works.moved(managed, topology.version))

    def _carry_out(self, managed: Managed, actions: Actions) -> None:
        if actions:
            self._works.carry_out(managed, actions)

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._book), "connection")
        return f"<AsyncConnectionManager: {state}>"


def unreached(managed: ManagedConnection[Any]) -> ConnectFailed:
    """What to tell a caller whose time is over."""
    last = managed.core.last_error
    why = describe(last) if last is not None else managed.trouble or "it does not answer"
    return ConnectFailed(f"no connection to {managed.config.address} in time: {why}")
