"""The manager for threads: one shared connection for each endpoint and identity.

It is a façade: the work is async and runs on the private loop thread, which alone changes the state
of the manager. Only a checkout of a connection that was used recently is made in the caller's
thread; it takes no lock.

Clients may release their channel, and make calls, in `__del__`, which the garbage collector may
call anywhere, also while a lock is held or on the loop thread in the middle of a change. So a
release and the report of a call are only posted to the loop thread, in a queue without a lock.
During interpreter shutdown nothing is posted: the connections end with the process.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, DeadlineExceeded, LoopThread

from . import _fork
from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._errors import ConfigError, ManagerClosed, no_config
from ._fork import must_not_wait
from ._handler import Handler
from ._managed import ManagedConnection
from ._manager_base import ManagerBase
from ._manager_options import ManagerOptions
from ._secrets import trace
from ._strategies import GlobalStrategy, RegularStrategy

__all__ = ["ConnectionManager"]

log = logging.getLogger("moored.rpc")

Managed = ManagedConnection[Handler]

#: Seconds that `close` waits for connections to close.
CLOSE_TIMEOUT = 30.0
#: Seconds that a failed call waits until the loop thread has seen its error.
PATIENCE = 1.0


class ConnectionManager(ManagerBase[Handler]):
    """Shares channels between clients, and reconnects them.

    `get_instance()` returns the manager of the process. Libraries and tests should create their
    own, with `with ConnectionManager(…) as manager:`. Options: see `ManagerOptions`.
    """

    _handler_type, _channel_type = Handler, grpc.Channel
    _regular, _moving = RegularStrategy, GlobalStrategy

    _instance: ClassVar[Any] = None
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, **options: Any) -> None:
        policy = ManagerOptions.of(options)
        super().__init__(policy, policy.clock or Clock.system())
        #: Changes that wait for the loop thread, and whether a task that makes them is scheduled.
        self._posted: deque[Callable[[], object]] = deque()
        self._scheduled = False
        _fork.register_manager(self)

    @classmethod
    def get_instance(cls) -> Self:
        """Return the manager of this class and process."""
        with cls._making:
            if cls._instance is None or cls._instance._closed:
                made = cls()
                if cls._instance is None or cls._instance._closed:  # still so
                    cls._instance = made
            found: Self = cls._instance
            return found

    # -- for clients ---------------------------------------------------------------------------

    def get_or_create(
        self,
        config: ConnectionConfig,
        dedicated: bool = False,
        client: object | None = None,
        timeout: float | None = None,
    ) -> Handler:
        """Return a connected channel to the endpoint, shared by all callers with the same key.

        :param dedicated: return a channel that is not shared, and is closed when it is released.
        :param client: the object that uses the channel, held weakly: when all clients of a channel
            are gone, it is closed after `linger` seconds.
        :param timeout: how long to wait for the connection, in seconds.
        """
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if not dedicated:
            # The common case first: a connection that exists and was used recently.
            found: Managed | None = self._table.entries.get(config.key)
            if found is not None:
                handler = found.handler  # first: the sweeper gives `found` another one to close
                if found.hand_out(client, self._clock.monotonic()):
                    return handler
        if client is not None:
            refuse_unreferable(client)
        if sys.is_finalizing():
            raise ManagerClosed("the interpreter is shutting down: no connection can be opened")
        if must_not_wait():
            raise ConfigError(
                "get_or_create was called again from a credentials or strategy factory of its own "
                "manager, or from a finalizer: create the channel outside of it"
            )
        deadline = self._deadline(timeout, self._policy.connect_timeout)
        return LoopThread.shared().run(self._obtain(config, dedicated, client, timeout, deadline))

    def release(self, handler: Handler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected.

        It does not wait, so it may be called in `__del__`. A dedicated connection refuses new
        calls, and is closed when its calls in flight have ended.
        """
        self._check(handler)
        managed = self._table.of(handler)
        if handler._own_key is not None or (managed is not None and managed.is_last(client)):
            handler._released = True  # at once, for calls of this thread
        self._change(partial(self._give_back, handler, client))

    def handle_error(
        self,
        handler: Handler,
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
        if _fork.is_broken() or must_not_wait():
            return False
        return LoopThread.shared().run(self._handle(handler, error, timeout, generation))

    def get_stats(self) -> dict[str, Any]:
        """Return the number of connections, the state of each, and the counters."""
        if not LoopThread.shared().alive or must_not_wait():
            return super().get_stats()

        async def read() -> dict[str, Any]:
            return super(ConnectionManager, self).get_stats()

        return LoopThread.shared().run(read())

    def close_all(self) -> None:
        """Close all connections when their calls have ended, and wait for that.

        It does not wait when a finalizer calls it on the loop thread, or during interpreter
        shutdown.
        """
        if self._posted or len(self._table) or self._table.asleep or LoopThread.shared().alive:
            self._change(self._end_all)
            if not must_not_wait():
                LoopThread.shared().run(self._background.all_closed(), CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._closed = True  # first: a connection that is opened meanwhile is closed below
        self.close_all()
        if not must_not_wait() and LoopThread.shared().alive:
            LoopThread.shared().run(self._background.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the loop thread --------------------------------------------------------------------

    def _change(self, change: Callable[[], object]) -> None:
        self._posted.append(change)
        if not self._scheduled and not sys.is_finalizing():
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        try:
            LoopThread.shared().submit(self._make_changes())
        except BaseException:
            self._scheduled = False
            raise

    async def _make_changes(self) -> None:
        while self._posted:
            change = self._posted.popleft()
            try:
                change()
            except Exception as error:
                log.error("a change of the manager failed\n%s", trace(error, ()))
        self._scheduled = False
        if self._posted:  # meanwhile, by a thread that has read True
            self._schedule()

    def _settle(self) -> None:
        """Wait until the changes that this thread has posted are made, but not for long."""
        if self._scheduled and not must_not_wait():
            with suppress(DeadlineExceeded):
                LoopThread.shared().run(_nothing(), PATIENCE)

    def _new_handler(self, config: ConnectionConfig) -> Handler:
        handler = super()._new_handler(config)
        handler._settle = self._settle
        return handler

    # -- after a fork --------------------------------------------------------------------------

    def _after_fork_in_child(self) -> None:
        """Drop all channels, which belong to the parent: the next call connects anew."""
        self._posted.clear()  # by threads of the parent
        self._scheduled = True  # a finalizer may post a change: it is made when this is done
        _fork.keep(self._background)
        self._background = self._new_background()
        # A thread of the parent may have held it.
        ConnectionManager._making = threading.RLock()
        for managed in self._table:
            self._inherit(managed)
        self._scheduled = False
        if self._posted:
            self._schedule()

    def _inherit(self, managed: Managed) -> None:
        generations = managed.core.generations
        managed.waiters = []
        managed.dial = None
        managed.core = self._new_core(managed.config)
        managed.core.inherited(generations, "this process was forked")
        # A strategy that follows a topology has a task on a loop of the parent.
        _fork.keep(managed.strategy)
        self._give_strategy(managed)


async def _nothing() -> None:
    """Run after the changes that were posted before."""
