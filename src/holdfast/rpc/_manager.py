"""The manager for threads: one connection for each endpoint and identity, recovered once.

Its lock is held for moments only: what takes time is done on the private loop thread, or by the
caller without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc  # type: ignore[import-untyped]

from holdfast.kernel import Clock, Deadline, LoopThread, Recorder, counted

from . import _fork
from ._book import Book
from ._channels import ThreadChannels
from ._config import ConnectionConfig
from ._core import Act, Action, Actions
from ._errors import ConnectFailed, ManagerClosed
from ._handler import Handler
from ._managed import ManagedConnection
from ._manager_async import unreached
from ._policy import Policy, refused
from ._strategies import GlobalStrategy, RegularStrategy
from ._topology import Topology
from ._works import Works

__all__ = ["ConnectionManager"]

Managed = ManagedConnection[Handler]

#: How long `close` waits for what must be closed.
CLOSE_TIMEOUT = 30.0


class ConnectionManager:
    """Shares channels between clients, and keeps them alive.

    `get_instance()` is the one of the process; one of your own, `ConnectionManager(…)` in a
    `with`, is better for libraries and tests. For its options see `Policy`.
    """

    _instance: ClassVar[ConnectionManager | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, **options: Any) -> None:
        self._policy = policy = Policy(**options)
        self._clock = policy.clock or Clock.system()
        self.recorder = policy.recorder or Recorder(clock=self._clock)
        self._book = Book()
        self._closed = False
        # Also those that are closed, and still end their calls.
        self._handlers: _fork.Herd[Handler] = _fork.Herd()
        self._begin()
        _fork.register(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._works = Works(
            self._lock,
            ThreadChannels(self._policy),
            policy=self._policy,
            clock=self._clock,
            recorder=self.recorder,
            book=self._book,
        )

    @classmethod
    def get_instance(cls) -> ConnectionManager:
        """The manager of this process."""
        with cls._making:
            if cls._instance is None or cls._instance._closed:
                cls._instance = cls()
            return cls._instance

    # -- for clients ---------------------------------------------------------------------------

    def get_or_create(
        self,
        config: ConnectionConfig,
        dedicated: bool = False,
        client: object | None = None,
        timeout: float | None = None,
    ) -> Handler:
        """A channel to the endpoint, connected; the same for all who may share it.

        :param dedicated: one that nobody else gets; it is closed when it is released.
        :param client: who uses it: when all of them are gone, it is closed after a while.
        :param timeout: how long to wait for it.
        """
        if not dedicated:
            # The common case, first: it is there, and was used lately.
            found: Managed | None = self._book.entries.get(config.key)
            if found is not None:
                with self._lock:
                    if found.hand_out(client, self._clock.monotonic()):
                        return found.handler
        limit = self._policy.connect_timeout if timeout is None else timeout
        deadline = Deadline.after(limit, self._clock)
        managed: Managed | None = None
        while True:
            with self._lock:
                if self._closed:
                    raise ManagerClosed("the manager is closed: make a new one")
                _fork.refuse_broken()
                actions: Actions = []
                if managed is None or managed.core.closed:
                    managed, actions = self._find_or_open(config, dedicated, timeout)
                actions = [*actions, *managed.come(self._clock.monotonic())]
                if managed.core.usable:
                    managed.taken(client)
                    return managed.handler
                waiter, more = self._join(managed)
            self._post(managed, [*actions, *more])
            self._await(managed, waiter, deadline)

    def release(self, handler: Handler, client: object | None = None) -> None:
        """The client does not need it any more; others who share it are not touched."""
        with self._lock:
            managed = self._book.of(handler)
            if managed is None:
                return
            managed.given_back(client)
            over = managed.dedicated and managed.deserted
        if over:
            self._close("it was released", managed)

    def handle_error(
        self, handler: Handler, error: BaseException, timeout: float | None = None
    ) -> bool:
        """A call failed: see to a new connection, if that may help, and wait for it.

        Returns whether the caller may try again, which is so until its own time is over. If the
        server has refused the credentials, they are refreshed, once for all callers, and the
        connection is kept: then it may try again unless the new ones were refused as well.
        """
        managed: Managed | None = self._book.of(handler)
        if managed is None:
            return False
        limit = managed.connect_timeout if timeout is None else timeout
        if managed.handler._refusals is not None and refused(error):
            return managed.handler._await_credentials(limit)
        if not self._policy.classify(error):
            return False
        if not isinstance(error, grpc.RpcError):
            # Those of gRPC were told by the handler, with the generation that they came from.
            self._broken(managed, error, managed.generation)
        deadline = Deadline.after(limit, self._clock)
        while True:
            with self._lock:
                if managed.core.closed:
                    return False
                if managed.core.usable:
                    return True
                waiter, actions = self._join(managed)
            self._post(managed, actions)
            try:
                self._await(managed, waiter, deadline)
            except ConnectFailed:
                return True

    def close_all(self) -> None:
        """Close all connections, when the calls over them have ended."""
        self._close("everything is closed", *self._book)

    def get_stats(self) -> dict[str, Any]:
        """What there is: how many connections, and each with its state."""
        with self._lock:
            return self._book.statistics(self._clock.monotonic())

    def close(self) -> None:
        """Close all connections, and take no more."""
        with self._lock:  # whoever opens one at the moment is in the book before it is read
            self._closed = True
        self.close_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- connections, under the lock -----------------------------------------------------------

    def _find_or_open(
        self, config: ConnectionConfig, dedicated: bool, timeout: float | None
    ) -> tuple[Managed, Actions]:
        found: Managed | None = None if dedicated else self._book.entries.get(config.key)
        if found is not None and not found.core.closed:
            return found, []
        managed = self._new(config, dedicated, timeout)
        self._book.add(managed)
        return managed, managed.core.open(self._clock.monotonic())

    def _new(self, config: ConnectionConfig, dedicated: bool, timeout: float | None) -> Managed:
        policy = self._policy
        managed: Managed = ManagedConnection(
            Handler(
                address=config.address,
                credentials=policy.credentials(config),
                wait_limit=policy.connect_timeout,
                grace=policy.grace,
            ),
            config,
            None,
            policy.core(config, self._clock, self.recorder, self._book.counters_of(config.address)),
            key=self._book.dedicated_key(config.key) if dedicated else config.key,
            dedicated=dedicated,
            created_at=self._clock.wall(),
            # A caller in a hurry must not leave those who come after it with attempts too short.
            connect_timeout=max(timeout or 0.0, policy.connect_timeout),
        )
        managed.handler._on_rpc_error = lambda error, number: self._failed(managed, error, number)
        managed.handler._on_waiting = lambda change: self._calls_wait(managed, change)
        managed.handler._on_close = lambda: self.release(managed.handler)
        managed.handler._on_unsent = lambda error: self._unsent(managed, error)
        managed.handler._on_refused = lambda: self._refused(managed)
        managed.handler._refusals = policy.refusals(managed.handler._credentials, self._clock)
        self._handlers.add(managed.handler)
        self._give_strategy(managed)
        return managed

    def _give_strategy(self, managed: Managed) -> None:
        strategy = managed.strategy = self._policy.strategy_of(
            managed.config, RegularStrategy, GlobalStrategy, self._clock, self.recorder
        )
        if isinstance(strategy, GlobalStrategy):
            strategy.on_change = lambda topology: self._moved(managed, topology)

    def _close(self, why: str, *over: Managed) -> None:
        with self._lock:
            closing = [(managed, managed.core.close(why)) for managed in over]
            for managed in over:
                # Whoever closes one of them at the same time finds it closed.
                self._works.shut(managed)
                self._book.remove(managed)

        async def close() -> None:
            # All first: while the calls over one end, so do those over the others.
            for managed, actions in closing:
                self._works.carry_out(managed, actions)
            for managed, _ in closing:
                await self._works.closed(managed)

        if closing:
            LoopThread.shared().run(close(), CLOSE_TIMEOUT)

    # -- waiting -------------------------------------------------------------------------------

    def _join(self, managed: Managed) -> tuple[Future[None], Actions]:
        waiter: Future[None] = Future()
        managed.waiters.append(waiter)
        return waiter, managed.core.wait(self._clock.monotonic())

    def _await(self, managed: Managed, waiter: Future[None], deadline: Deadline) -> None:
        try:
            waiter.result(deadline.timeout)
        except TimeoutError:
            raise unreached(managed) from managed.core.last_error
        finally:
            actions: Actions = []
            with self._lock:
                if waiter in managed.waiters:
                    managed.waiters.remove(waiter)
                    actions = managed.core.leave(self._clock.monotonic())
            self._post(managed, actions)

    def _calls_wait(self, managed: Managed, change: int) -> None:
        self._tell(managed, managed.core.call_waits if change > 0 else managed.core.leave)

    # -- errors --------------------------------------------------------------------------------

    def _failed(self, managed: Managed, error: BaseException, generation: int) -> None:
        if self._policy.classify(error):
            self._broken(managed, error, generation)

    def _broken(self, managed: Managed, cause: BaseException | str, generation: int) -> None:
        self._tell(managed, lambda now: self._works.broken(managed, generation, cause))

    def _unsent(self, managed: Managed, error: BaseException) -> None:
        with self._lock:
            self._works.unsent(managed, error)

    def _refused(self, managed: Managed) -> None:
        self._post(managed, [Action(Act.REFRESH)])

    def _moved(self, managed: Managed, topology: Topology) -> None:
        self._tell(managed, lambda now: self._works.moved(managed, topology.version))

    def _tell(self, managed: Managed, event: Callable[[float], Actions]) -> None:
        with self._lock:
            actions = event(self._clock.monotonic())
        self._post(managed, actions)

    def _post(self, managed: Managed, actions: Actions) -> None:
        """Have it done on the loop thread."""
        if not actions:
            return

        async def do() -> None:
            self._works.carry_out(managed, actions)
            self._works.watch()

        LoopThread.shared().submit(do())

    # -- around a fork -------------------------------------------------------------------------

    def _before_fork(self, patience: float) -> bool:
        """No call is under way while the process is copied; says whether that is so."""
        ends, quiet = monotonic() + patience, True
        for handler in self._handlers:
            quiet = handler.drain(max(0.0, ends - monotonic())) and quiet
        return quiet

    def _lock_for_fork(self, patience: float) -> None:
        """Nobody is in the middle of a change."""
        self._held = self._lock.acquire(timeout=patience)

    def _after_fork_in_parent(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()
        for handler in self._handlers:
            handler.resume()

    def _after_fork_in_child(self) -> None:
        """Nothing that was open belongs to this process: whoever calls opens it anew."""
        _fork.keep(self._works)
        # Somebody may have been in the middle of it, who is not here.
        ConnectionManager._making = threading.Lock()
        self._begin()
        for handler in self._handlers:
            handler.reset()
        for managed in self._book:
            self._inherit(managed)

    def _inherit(self, managed: Managed) -> None:
        generation, over = managed.generation, managed.core.closed
        managed.waiters = []
        managed.dial = None
        if over:
            self._book.remove(managed)
            managed.handler._shut(0.0)
            return
        managed.core = self._policy.core(
            managed.config, self._clock, self.recorder, managed.core.counters
        )
        managed.core.inherited(generation)
        # One that follows a topology does so on a loop that is not here.
        _fork.keep(managed.strategy)
        self._give_strategy(managed)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._book), "connection")
        return f"<ConnectionManager: {state}>"
