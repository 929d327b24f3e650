"""The manager for threads: one connection for each endpoint and identity, recovered once.

Its lock is held for moments only: what takes time is done on the private loop thread, or by the
caller without the lock.

Clients may give their channel back, and make calls, in `__del__`, which the garbage collector calls
anywhere: all that these change is changed with `Changes`.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, Deadline, LoopThread, Recorder, counted

from . import _fork
from ._book import Book
from ._changes import Changes, Work
from ._channels import ThreadChannels
from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._core import Act, Action, Actions
from ._errors import ConfigError, ConnectFailed, ManagerClosed, no_channel, no_config, uncopied
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
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, **options: Any) -> None:
        self._policy = policy = Policy.of(options)
        self._clock = policy.clock or Clock.system()
        self.recorder = policy.recorder or Recorder(clock=self._clock)
        self._book = Book()
        self._closed = False
        # Also those that are closed, and still end their calls.
        self._handlers: _fork.Herd[Handler] = _fork.Herd()
        self._begin()
        _fork.register(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        self._changes = Changes(self._lock, self._carry_out)
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
                made = cls()
                if cls._instance is None or cls._instance._closed:  # still so
                    cls._instance = made
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
        :param client: who uses it, held weakly: when all of them are gone, it is closed after a
            while.
        :param timeout: how long to wait for it.
        """
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if not dedicated:
            # The common case, first: it is there, and was used lately.
            found: Managed | None = self._book.entries.get(config.key)
            if found is not None:
                with self._lock:
                    if found.hand_out(client, self._clock.monotonic()):
                        return found.handler
        if client is not None:
            refuse_unreferable(client)
        if self._changes.under_way():
            # What opens a connection would wait for this change to end.
            raise ConfigError(
                "get_or_create was called in the middle of a change of its own manager: what the "
                "options credentials and strategy name must not use it, nor may a finalizer"
            )
        if sys.is_finalizing():
            raise ManagerClosed("the interpreter ends: no connection can be opened any more")
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
            self._changes.post([(managed, [*actions, *more])])
            self._await(managed, waiter, deadline)

    def release(self, handler: Handler, client: object | None = None) -> None:
        """The client does not need it any more; others who share it are not touched.

        It may be called in `__del__`: it does not wait. A dedicated connection takes no more calls,
        and is closed when those that are under way have ended.
        """
        self._changes.make(partial(self._give_back, handler, client))

    def handle_error(
        self,
        handler: Handler,
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
            if not isinstance(handler, Handler):
                raise no_channel(handler)
            # A call over one that is asleep opens a connection.
            return handler._asleep is not None and self._policy.classify(error)
        limit = managed.connect_timeout if timeout is None else timeout
        if managed.handler._refusals is not None and refused(error):
            return managed.handler._await_credentials(limit)
        if not self._policy.classify(error):
            return False
        if generation is not None or not isinstance(error, grpc.RpcError):
            # Those of gRPC were told by the handler, with the generation that they came from.
            self._broken(managed, error, generation)
        if self._changes.is_in_vain():
            return False  # a finalizer
        deadline = Deadline.after(limit, self._clock)
        while True:
            with self._lock:
                if managed.core.closed:
                    return False
                if managed.core.usable:
                    return True
                waiter, actions = self._join(managed)
            self._changes.post([(managed, actions)])
            try:
                self._await(managed, waiter, deadline)
            except ConnectFailed:
                return True
            except ConfigError:
                return False

    def close_all(self) -> None:
        """Close all connections, when the calls over them have ended, and wait for that.

        Not in `__del__`, though, if the garbage collector has called it in the middle of a change,
        or while the interpreter ends.
        """
        self._changes.make(self._end_all)
        if sys.is_finalizing():
            return
        if self._changes.posted and not self._changes.under_way():
            loop = LoopThread.shared()
            if not loop.is_current:
                loop.run(self._works.all_closed(), CLOSE_TIMEOUT)

    def get_stats(self) -> dict[str, Any]:
        """What there is: how many connections, and each with its state."""
        with self._lock:
            return self._book.statistics(self._clock.monotonic())

    def close(self) -> None:
        """Close all connections, and take no more."""
        self._closed = True  # whoever opens one at the moment is in the book before it is read
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
        # One that had a channel before opens one as soon as somebody waits.
        fresh = not managed.generation
        return managed, managed.core.open(self._clock.monotonic()) if fresh else []

    def _new(self, config: ConnectionConfig, dedicated: bool, timeout: float | None) -> Managed:
        key = self._book.dedicated_key(config.key) if dedicated else config.key
        # A caller in a hurry must not leave those who come after it with attempts too short.
        limit = max(timeout or 0.0, self._policy.connect_timeout)
        found = self._book.asleep.get(key)
        return self._manage(found or self._new_handler(config), config, key, dedicated, limit)

    def _new_handler(self, config: ConnectionConfig) -> Handler:
        policy = self._policy
        handler = Handler(
            address=config.address,
            credentials=policy.credentials(config),
            wait_limit=policy.connect_timeout,
            grace=policy.grace,
            now=self._clock.monotonic,
        )
        handler._refusals = policy.refusals(handler._credentials, self._clock)
        self._handlers.add(handler)
        return handler

    def _manage(
        self, handler: Handler, config: ConnectionConfig, key: str, dedicated: bool, limit: float
    ) -> Managed:
        managed: Managed = ManagedConnection(
            handler,
            config,
            None,
            self._policy.core(
                config, self._clock, self.recorder, self._book.counters_of(config.address)
            ),
            key=key,
            dedicated=dedicated,
            created_at=self._clock.monotonic(),
            connect_timeout=limit,
        )
        self._give_strategy(managed)  # first: it may fail
        if handler._asleep is not None:
            managed.address = handler.address
            managed.core.inherited(handler._asleep, "somebody holds the channel, and wants it")
            handler._asleep = None
        managed.part = lambda: self._part(managed)
        handler._on_rpc_error = lambda error, number: self._failed(managed, error, number)
        handler._on_waiting = lambda change: self._calls_wait(handler, managed, change)
        handler._on_close = lambda: self.release(handler)
        handler._on_unsent = lambda error: self._unsent(managed, error)
        handler._on_refused = lambda: self._refused(managed)
        handler._is_in_vain = lambda: self._changes.is_in_vain()
        self._book.add(managed)
        return managed

    def _give_strategy(self, managed: Managed) -> None:
        strategy = managed.strategy = self._policy.strategy_of(
            managed.config, RegularStrategy, GlobalStrategy, self._clock, self.recorder
        )
        if isinstance(strategy, GlobalStrategy):
            strategy.on_change = lambda topology: self._moved(managed, topology)

    def _part(self, managed: Managed) -> bool:
        if not self._book.part(managed):
            return False
        self._handlers.add(managed.handler)
        return True

    def _give_back(self, handler: Handler, client: object | None) -> Work:
        managed = self._book.of(handler)
        if managed is None:
            if not isinstance(handler, Handler):
                raise no_channel(handler)
            self._book.end_asleep(handler)
            return []
        managed.given_back(client)
        over = managed.dedicated and managed.deserted
        return [self._end(managed, "it was released")] if over else []

    def _end_all(self) -> Work:
        # All first: while the calls over one end, so do those over the others.
        work = [self._end(managed, "everything is closed") for managed in self._book]
        for handler in list(self._book.asleep.values()):
            handler._shut()
        self._book.asleep.clear()
        return work

    def _end(self, managed: Managed, why: str) -> tuple[Managed, Actions]:
        actions = managed.core.close(why)
        # Whoever closes it at the same time finds it closed.
        self._works.shut(managed)
        self._book.remove(managed)
        return managed, actions

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
            self._changes.post([(managed, actions)])

    def _calls_wait(self, handler: Handler, known: Managed, change: int) -> None:
        self._changes.make(partial(self._count_waiting, handler, known, change))

    def _count_waiting(self, handler: Handler, known: Managed, change: int) -> Work:
        managed = self._book.of(handler)
        if managed is None:
            if change < 0 or handler._asleep is None:
                return []
            managed = self._wake(handler, known)
        now, core = self._clock.monotonic(), managed.core
        return [(managed, core.call_waits(now) if change > 0 else core.leave(now))]

    def _wake(self, handler: Handler, known: Managed) -> Managed:
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
        def broken() -> Work:
            known = generation
            if known is None:
                known = managed.core.blamed(self._clock.monotonic())
            return [(managed, self._works.broken(managed, known, cause))]

        self._changes.make(broken)

    def _unsent(self, managed: Managed, error: BaseException) -> None:
        def unsent() -> Work:
            self._works.unsent(managed, error)
            return []

        self._changes.make(unsent)

    def _refused(self, managed: Managed) -> None:
        self._changes.post([(managed, [Action(Act.REFRESH)])])

    def _moved(self, managed: Managed, topology: Topology) -> None:
        self._changes.make(lambda: [(managed, self._works.moved(managed, topology.version))])

    def _carry_out(self, work: Work) -> None:
        """What follows from a change; on the loop thread."""
        for managed, actions in work:
            self._works.carry_out(managed, actions)
        self._works.watch()

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
        lock, held, works = self._lock, self._held, self._works
        self._begin()
        _fork.keep(works)
        # Somebody may have been in the middle of it, who is not here.
        ConnectionManager._making = threading.RLock()
        for handler in self._handlers:
            handler.reset()
        if held:
            # A finalizer may have left a change to the loop thread of this process: it waits here.
            lock.release()
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

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._book), "connection")
        return f"<ConnectionManager: {state}>"
