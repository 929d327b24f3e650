"""The manager for threads: one connection for each endpoint and identity, recovered once.

Its lock is held for moments only: what takes time is done on the private loop thread, or by the
caller without the lock.

Clients may give their channel back, and make calls, in `__del__`, which the garbage collector calls
anywhere: all that these change is changed with `ManagerChanges`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, ClassVar, Self

from moored.kernel import Clock, LoopThread

from . import _fork
from ._background import Background
from ._changes import ManagerChanges, Work
from ._channels import ThreadChannels
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

#: How long `close` waits for what must be closed.
CLOSE_TIMEOUT = 30.0


class ConnectionManager(ManagerBase[Handler]):
    """Shares channels between clients, and keeps them alive.

    `get_instance()` is the one of the process; one of your own, `ConnectionManager(…)` in a
    `with`, is better for libraries and tests. For its options see `ManagerOptions`.
    """

    _handler_type = Handler
    _regular, _moving = RegularStrategy, GlobalStrategy

    _lock: threading.RLock
    _instance: ClassVar[ConnectionManager | None] = None
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, **options: Any) -> None:
        policy = ManagerOptions.of(options)
        super().__init__(policy, policy.clock or Clock.system())
        # Also those that are closed, and still end their calls.
        self._handlers: Clients[Handler] = Clients()
        self._begin()
        _fork.register(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        self._changes = ManagerChanges(self._lock, self._carry_out)
        self._background = Background(
            self._lock,
            ThreadChannels(self._policy),
            policy=self._policy,
            clock=self._clock,
            recorder=self.recorder,
            table=self._table,
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
        """Return a connected channel to the endpoint, shared by all callers with the same key.

        :param dedicated: a channel that is not shared; it is closed when it is released.
        :param client: who uses it, held weakly: when all of them are gone, it is closed after a
            while.
        :param timeout: how long to wait for it.
        """
        if not isinstance(config, ConnectionConfig):
            raise no_config(config)
        if not dedicated:
            # The common case, first: it is there, and was used lately.
            found: Managed | None = self._table.entries.get(config.key)
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
        deadline = self._deadline(timeout, self._policy.connect_timeout)
        self._changes.posted = True
        return LoopThread.shared().run(self._obtain(config, dedicated, client, timeout, deadline))

    def release(self, handler: Handler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected.

        It may be called in `__del__`: it does not wait. A dedicated connection takes no more calls,
        and is closed when those that are under way have ended.
        """
        self._change(partial(self._give_back, handler, client))

    def handle_error(
        self,
        handler: Handler,
        error: BaseException,
        timeout: float | None = None,
        generation: int | None = None,
    ) -> bool:
        """Report a failed call: open a new connection, if that may help, and wait for it.

        :param generation: the handler's, from before the call, for an error that is not gRPC's own:
            one of an old generation changes nothing. Without it, one that comes within 5 s of a new
            generation is taken for late.

        Returns whether the caller may try again, which is so until its own time is over. If the
        server has refused the credentials, they are refreshed, once for all callers, and the
        connection is kept: then it may try again unless the new ones were refused as well.
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
        """Close all connections, when the calls over them have ended, and wait for that.

        Not in `__del__`, though, if the garbage collector has called it in the middle of a change,
        or while the interpreter ends.
        """
        self._change(self._end_all)
        if sys.is_finalizing():
            return
        if self._changes.posted and not self._changes.under_way():
            loop = LoopThread.shared()
            if not loop.is_current:
                loop.run(self._background.all_closed(), CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close all connections, and take no more."""
        self._closed = True  # whoever opens one at the moment is in the book before it is read
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
        """Wait until no call is in flight; return whether that is so."""
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
        """Drop what was open, which belongs to the parent: the next call connects anew."""
        lock, held, works = self._lock, self._held, self._background
        self._begin()
        _fork.keep(works)
        # Somebody may have been in the middle of it, who is not here.
        ConnectionManager._making = threading.RLock()
        for handler in self._handlers:
            handler.reset()
        if held:
            # A finalizer may have left a change to the loop thread of this process: it waits here.
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
        # One that follows a topology does so on a loop that is not here.
        _fork.keep(managed.strategy)
        self._give_strategy(managed)
