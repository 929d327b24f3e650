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

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, DeadlineExceeded, LoopThread, at_fork, raise_if_cancelled

from . import _fork
from ._clients import refuse_unreferable
from ._config import ConnectionConfig
from ._endpoint import Endpoint
from ._errors import ConfigError, ManagerClosed, no_config
from ._fork import must_not_wait
from ._gate import Gate
from ._handler import Handler
from ._manager_base import ManagerBase
from ._manager_options import ManagerOptions
from ._secrets import trace
from ._strategies import GlobalStrategy, RegularStrategy

__all__ = ["ChangeQueue", "ConnectionManager"]

log = logging.getLogger("moored.rpc")

#: Seconds that `close` waits for connections to close.
CLOSE_TIMEOUT = 30.0
#: Seconds that a failed call waits until the loop thread has seen its error.
PATIENCE = 1.0


class ChangeQueue:
    """Changes that wait for the loop thread; any thread may add one, anywhere."""

    def __init__(self) -> None:
        self._changes: deque[Callable[[], object]] = deque()
        #: Whether a task that makes them is scheduled.
        self.scheduled = False

    def post(self, change: Callable[[], object]) -> None:
        self._changes.append(change)
        if not self.scheduled and not sys.is_finalizing():
            self._schedule()

    def settle(self) -> None:
        """Wait until the changes that this thread has posted are made, but not for long."""
        if self.scheduled and not must_not_wait():
            with suppress(DeadlineExceeded):
                LoopThread.shared().run(_nothing(), PATIENCE)

    def _schedule(self) -> None:
        self.scheduled = True
        try:
            LoopThread.shared().submit(self._make_changes())
        except BaseException:
            self.scheduled = False
            raise

    async def _make_changes(self) -> None:
        try:
            while self._changes:
                change = self._changes.popleft()
                try:
                    change()
                except (Exception, asyncio.CancelledError) as error:  # of the user's code
                    raise_if_cancelled(error)
                    log.error("a change of the manager failed\n%s", trace(error, ()))
        finally:
            self.scheduled = False
        if self._changes:  # meanwhile, by a thread that has read True
            self._schedule()

    def forked(self) -> None:
        """Forget the changes of the parent's threads."""
        self._changes.clear()
        self.scheduled = False

    def __bool__(self) -> bool:
        return bool(self._changes)


class ConnectionManager(ManagerBase[Handler]):
    """Shares channels between clients, and reconnects them.

    `get_instance()` returns the manager of the process. Libraries and tests should create their
    own, with `with ConnectionManager(…) as manager:`. Options: see `ManagerOptions`.
    """

    _handler_type, _gate_type, _channel_type = Handler, Gate, grpc.Channel
    _regular, _moving = RegularStrategy, GlobalStrategy

    _instance: ClassVar[Any] = None
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, **options: Any) -> None:
        checked = ManagerOptions.of(options)
        self._queue = ChangeQueue()
        super().__init__(checked, checked.clock or Clock.system(), self._queue)
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
            found: Endpoint | None = self._table.awake.get(config.key)
            if found is not None and found.hand_out(client, self._clock.monotonic()):
                handler: Handler = found.handler
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
        deadline = self._deadline(timeout)
        return LoopThread.shared().run(self._obtain(config, dedicated, client, timeout, deadline))

    def release(self, handler: Handler, client: object | None = None) -> None:
        """Return a channel; its other clients are not affected.

        It does not wait, so it may be called in `__del__`. A dedicated connection refuses new
        calls, and is closed when its calls in flight have ended.
        """
        self._background.release(self._gate_of(handler), client)

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

    def renew(self, handler: Handler) -> bool:
        """Make a new connection for new calls; those in flight go on over the present one.

        Return whether it is being made: not without a connection, nor within 5 s of the last time.
        """
        endpoint = self._gate_of(handler).endpoint
        if _fork.is_broken() or must_not_wait():
            return False

        async def renew() -> bool:
            return self._background.renew(endpoint)

        return LoopThread.shared().run(renew())

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
        if self._queue or self._table.all() or LoopThread.shared().alive:
            self._queue.post(self._end_all)
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

    def _after_fork_in_child(self) -> None:
        """Drop all channels, which belong to the parent: the next call connects anew."""
        _fork.keep(self._background)
        self._table.unlock()
        self._background = self._new_background()
        for endpoint in self._table.all():
            _fork.keep((endpoint.live, endpoint.old, endpoint.strategy))
            endpoint.forked()
            endpoint.handler.gate.serve(self._background)
            if endpoint.closed:
                self._table.remove(endpoint)
            else:
                self._table.rest(endpoint)
        self._queue.forked()

    @classmethod
    def unlock(cls) -> None:
        """Make a new lock: in the child of a fork, a thread of the parent may have held it."""
        cls._making = threading.RLock()


async def _nothing() -> None:
    """Run after the changes that were posted before."""


at_fork(after_in_child=ConnectionManager.unlock)
