"""The manager for threads: one shared connection for each endpoint and identity.

Its lock is never held for long: slow work runs on the private loop thread, or in the caller without
the lock.

Clients may release their channel, and make calls, in `__del__`, which the garbage collector may
call anywhere: so state is changed through `ManagerChanges`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, ClassVar, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, LoopThread

from . import _fork
from ._changes import ManagerChanges, Work
from ._clients import Clients, refuse_unreferable
from ._config import ConnectionConfig
from ._errors import ConfigError, ManagerClosed, no_config
from ._handler import Handler
from ._managed import ManagedConnection
from ._manager_base import ManagerBase
from ._manager_options import ManagerOptions, refused
from ._strategies import GlobalStrategy, RegularStrategy

__all__ = ["ConnectionManager"]

Managed = ManagedConnection[Handler]

#: Seconds that `close` waits for connections to close.
CLOSE_TIMEOUT = 30.0


class ConnectionManager(ManagerBase[Handler]):
    """Shares channels between clients, and reconnects them.

    `get_instance()` returns the manager of the process. Libraries and tests should create their
    own, with `with ConnectionManager(…) as manager:`. Options: see `ManagerOptions`.
    """

    _handler_type, _channel_type = Handler, grpc.Channel
    _regular, _moving = RegularStrategy, GlobalStrategy

    _lock: threading.RLock
    _instance: ClassVar[Any] = None
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, **options: Any) -> None:
        policy = ManagerOptions.of(options)
        super().__init__(policy, policy.clock or Clock.system())
        # Also the closed ones, whose calls may still be in flight.
        self._handlers: Clients[Handler] = Clients()
        self._begin()
        _fork.register(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        self._changes = ManagerChanges(self._lock, self._carry_out)
        self._background = self._new_background()

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
                with self._lock:
                    if found.hand_out(client, self._clock.monotonic()):
                        return found.handler
        if client is not None:
            refuse_unreferable(client)
        if self._changes.under_way():
            # Opening a connection would wait for the end of this change.
            raise ConfigError(
                "get_or_create was called again from a credentials or strategy factory of its own "
                "manager, or from a finalizer: create the channel outside of it"
            )
        if sys.is_finalizing():
            raise ManagerClosed("the interpreter is shutting down: no connection can be opened")
        deadline = self._deadline(timeout, self._policy.connect_timeout)
        self._changes.posted = True
        return LoopThread.shared().run(self._obtain(config, dedicated, client, timeout, deadline))

    def release(self, handler: Handler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected.

        It does not wait, so it may be called in `__del__`. A dedicated connection refuses new
        calls, and is closed when its calls in flight have ended.
        """
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
        managed = self._known(handler, error)
        if isinstance(managed, bool):
            return managed
        if _fork.is_broken():
            return False
        if managed.handler._refusals is not None and refused(error):
            limit = managed.connect_timeout if timeout is None else timeout
            return managed.handler._await_credentials(limit)
        if not self._may_recover(managed, error, generation):
            return False
        if self._changes.must_not_wait():
            return False  # a finalizer
        with self._lock:
            if managed.core.usable or managed.core.closed:
                return not managed.core.closed
        deadline = self._deadline(timeout, managed.connect_timeout)
        return LoopThread.shared().run(self._recovered(managed, deadline))

    def close_all(self) -> None:
        """Close all connections when their calls have ended, and wait for that.

        It does not wait when a finalizer calls it during a change of the manager, or during
        interpreter shutdown.
        """
        self._change(self._end_all)
        if sys.is_finalizing():
            return
        if self._changes.posted and not self._changes.under_way():
            loop = LoopThread.shared()
            if not loop.is_current:
                loop.run(self._background.all_closed(), CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close all connections, and refuse new ones."""
        self._closed = True  # first: a connection that is opened meanwhile is closed below
        self.close_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _change(self, change: Callable[[], Work]) -> None:
        self._changes.make(change)

    # -- connections, under the lock -----------------------------------------------------------

    def _new_handler(self, config: ConnectionConfig) -> Handler:
        handler = super()._new_handler(config)
        handler._forbids_waiting = lambda: self._changes.must_not_wait()
        self._handlers.add(handler)
        return handler

    def _detach(self, managed: Managed) -> bool:
        if not super()._detach(managed):
            return False
        self._handlers.add(managed.handler)
        return True

    # -- around a fork -------------------------------------------------------------------------

    def _shut_gates(self) -> None:
        for handler in self._handlers:
            handler.shut_gate()

    def _before_fork(self, patience: float) -> bool:
        """Wait until no call is in flight; return whether none is."""
        ends, quiet = monotonic() + patience, True
        for handler in self._handlers:
            quiet = handler.drain(ends - monotonic()) and quiet
        return quiet

    def _lock_for_fork(self, patience: float) -> bool:
        """Acquire the lock, so that no change is half-done; return whether it was acquired."""
        self._held = self._lock.acquire(timeout=patience)
        return self._held

    def _after_fork_in_parent(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()
        for handler in self._handlers:
            handler.resume()

    def _after_fork_in_child(self) -> None:
        """Drop all channels, which belong to the parent: the next call connects anew."""
        lock, held, background = self._lock, self._held, self._background
        self._begin()
        _fork.keep(background)
        # A thread of the parent may have held it.
        ConnectionManager._making = threading.RLock()
        for handler in self._handlers:
            handler.reset()
        if held:
            # A finalizer may have posted a change to this process's loop thread: it waits here.
            lock.release()
        for managed in self._table:
            self._inherit(managed)

    def _inherit(self, managed: Managed) -> None:
        generation, over = managed.generation, managed.core.closed
        managed.waiters = []
        managed.dial = None
        if over:
            self._table.remove(managed)
            managed.handler._shut(0.0)
            return
        managed.core = self._policy.core(
            managed.config, self._clock, self.recorder, managed.core.counters
        )
        managed.core.inherited(generation)
        # A strategy that follows a topology has a task on a loop of the parent.
        _fork.keep(managed.strategy)
        self._give_strategy(managed)
