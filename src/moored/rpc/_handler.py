"""The `grpc.Channel` that users hold: it stays valid while the connection below it is replaced.

Generated stubs and `grpc.intercept_channel` accept it. It has one current generation at a time (see
`_generations`). Invariants:

- without a generation, a call waits for one within its own timeout, and passes the rest of that
  timeout to the real call;
- a failed call raises in its caller, is reported to the manager, and is never retried.

A unary call waits in its thread. `future()` and calls with streams return at once, and begin when
there is a generation (see `_pending_sync`).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored.kernel import LoopThread, start_thread

from ._channel_pool import Connectivity
from ._errors import ConfigError
from ._fork import WATCHED, inside, is_busy, must_not_wait, refuse_broken, register
from ._generations import Generations, nothing
from ._grpc_internals import cut
from ._live_channel import LiveChannel
from .calls._kinds import FourKinds
from .calls._methods import thread_method
from .calls._pending_sync import PendingCall, fail_pending, start_pending
from .calls._unsent import CallUnsent, from_finalizer

__all__ = ["Handler", "call_later"]

Later = Callable[[float, Callable[[], None]], Callable[[], object]]


def call_later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
    """Call a function after a delay on the loop thread, or at once in a thread of its own.

    Return a function that cancels it. During interpreter shutdown nothing is called: no thread can
    be started.
    """
    if sys.is_finalizing():
        return nothing
    if delay <= 0:
        start_thread(act, name="moored-rpc-close")
        return nothing

    async def wait() -> None:
        await asyncio.sleep(delay)
        act()

    return LoopThread.shared().submit(wait()).cancel


class Handler(Generations, FourKinds, grpc.Channel):  # type: ignore[misc]
    """A channel over the current connection of a manager.

    :param credentials: adds to the metadata of each call.
    :param wait_limit: how long a call without a timeout waits for a connection.
    :param grace: how long the calls of a replaced generation may still take, unless its connection
        is alive and leads to a server that is still wanted.
    :param later: calls a function after a delay, in another thread.
    :param now: the manager's clock; timeouts of calls use the system's.
    """

    _unsent_error = CallUnsent

    def __init__(self, *, later: Later = call_later, **options: Any) -> None:
        # Reentrant: the garbage collector may end a call anywhere.
        self._lock = self._changed = threading.Condition(threading.RLock())
        self._later = later
        #: Waits until the manager has seen the failed calls of this thread; set by it.
        self._settle: Callable[[], object] = nothing
        self._gated = False
        self._subscribers: list[Connectivity] = []
        #: Futures and streams without a generation yet.
        self._pending: list[PendingCall] = []
        super().__init__(**options)
        register(self)

    # -- for users -----------------------------------------------------------------------------

    _method = thread_method

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None = False) -> None:
        """Add a connectivity callback, for the current connection and for those that follow it."""
        if try_to_connect and self._current is None:
            self._open_soon()
        with self._changed:
            self._subscribers.append(callback)
            if (live := self._live) is not None:
                live.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Remove a connectivity callback."""
        with self._changed:
            if callback not in self._subscribers:
                return
            self._subscribers.remove(callback)
            if (live := self._current) is not None:
                live.channel.unsubscribe(callback)

    def close(self) -> None:
        """Release the channel: a shared one stays open for its other clients."""
        if self._on_close is not None:
            self._on_close()
        else:
            self._shut(0.0)

    def __enter__(self) -> Handler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for the manager -----------------------------------------------------------------------

    def _open_soon(self) -> None:
        refuse_broken()
        super()._open_soon()

    def _shut(self, grace: float | None = None) -> None:
        with self._changed:
            self._subscribers.clear()
        super()._shut(grace)

    def _wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until every replaced generation is closed; return whether all are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._retiring, timeout)

    # -- around a fork -------------------------------------------------------------------------

    def shut_gate(self) -> None:
        """Delay new calls."""
        with self._changed:
            self._gated = True
            if self._live is not None:
                self._parked, self._live = self._live, None
                self._follow(self._parked, None)
            for live in self._lives():
                live.watcher = self._call_ended

    def drain(self, timeout: float) -> bool:
        """Delay new calls, and wait for those in flight; return whether all have ended."""
        with self._changed:
            self.shut_gate()
            deadline = monotonic() + timeout
            while busy := [live for live in self._lives() if is_busy(live)]:
                calling = any(live.calls for live in busy)
                left = deadline - monotonic() + (0.0 if calling else WATCHED)
                if left <= 0:
                    return False
                # Poll: a call that the garbage collector ends notifies no one.
                self._changed.wait(min(left, 0.05))
            return True

    def resume(self) -> None:
        """Let calls begin again, in the parent after the fork."""
        with self._changed:
            self._gated = False
            if (live := self._parked) is not None:
                self._parked = None
                live.watcher = None
                self._live = live
                self._follow(None, live)
                self._changed.notify_all()
        self._start_pending()

    def reset(self) -> None:
        """Start anew in a forked child: inherited channels are neither used nor closed."""
        super().reset()
        self._gated = False
        for call in self._pending:
            call.abandon()
        self._pending = []
        self._subscribers = []
        self._lock = self._changed = threading.Condition(threading.RLock())

    # -- a call --------------------------------------------------------------------------------

    def _enter(self, timeout: float | None) -> tuple[LiveChannel, float | None]:
        """Count a new call; return its generation, and the rest of its timeout."""
        live = self._enter_now()
        return (live, timeout) if live is not None else self._wait(timeout)

    def _enter_now(self) -> LiveChannel | None:
        """Count a new call over the current generation; return None if there is none."""
        self._used_at = self._now()
        live = self._live
        if live is not None and not self._released:
            live.calls.append(None)
            if self._live is live:
                return live
            live.leave()
        return None

    def _wait(self, timeout: float | None) -> tuple[LiveChannel, float | None]:
        began = monotonic()
        deadline = began + (self._wait_limit if timeout is None else timeout)
        verdicts = self._verdicts
        if must_not_wait():
            raise CallUnsent(*from_finalizer(self._address))
        refuse_broken()  # first: otherwise the manager would open a connection for the call
        self._waiting(+1)
        try:
            while True:
                live = self._next(began, deadline, timeout is not None, verdicts)
                live.calls.append(None)
                if self._live is live:
                    left = None if timeout is None else max(0.0, deadline - monotonic())
                    return live, left
                live.leave()
        finally:
            self._waiting(-1)

    def _next(self, began: float, deadline: float, own: bool, verdicts: int) -> LiveChannel:
        with self._changed:
            while (live := self._live) is None or self._released:
                now = monotonic()
                if (error := self._unsent_reason(verdicts, began, deadline, now, own)) is not None:
                    raise error
                self._changed.wait(deadline - now)
            return live

    def _await_change(self, seen: LiveChannel | None, timeout: float) -> bool:
        """Wait for another current generation; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (self._live is not None and self._live is not seen),
                timeout,
            )

    def _await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh in progress; return whether a refused call may be retried."""
        if must_not_wait():
            return False
        with self._changed:
            if (refusals := self._refusals) is None:
                return False
            self._changed.wait_for(lambda: self._closed or not refusals.refreshing, timeout)
            return refusals.mended and not self._closed

    def _signed(self, metadata: Any) -> Any:
        """Return the call's metadata and those of the credentials."""
        if self._credentials is None:
            return metadata
        added = self._credentials.metadata()
        if not isinstance(added, (tuple, list)):
            if hasattr(added, "close"):
                added.close()
            raise ConfigError("credentials that must be awaited are for asyncio only")
        return self._joined(metadata, added)

    # -- generations, under the lock -----------------------------------------------------------

    def _notify(self) -> None:
        self._changed.notify_all()

    def _after(self, delay: float, act: Callable[[], None]) -> Callable[[], object]:
        return self._later(delay, act)

    def _closing_handler(self) -> Handler:
        return Handler(address=self._address, grace=self._grace, later=self._later, now=self._now)

    _start_pending, _fail_pending = start_pending, fail_pending

    def _put(self, live: LiveChannel) -> None:
        if self._gated:
            live.watcher = self._call_ended
            self._parked = live
        else:
            self._live = live

    def _follow(self, old: LiveChannel | None, new: LiveChannel | None) -> None:
        for callback in self._subscribers:
            if old is not None:
                old.channel.unsubscribe(callback)
            if new is not None and not self._gated:
                # Without try_to_connect: it is connected, and gRPC's watcher thread would fail with
                # a traceback if the channel was closed soon after.
                new.channel.subscribe(callback, False)

    def _call_ended(self, live: LiveChannel) -> None:
        if live.calls:
            return
        with self._changed:
            self._changed.notify_all()
        if live.retired:
            self._close_live(live)

    def _close_soon(self, live: LiveChannel) -> None:
        # In another thread: closing may block, and this thread may be one that the channel needs.
        self._later(0.0, partial(self._close_channel, live))

    def _close_channel(self, live: LiveChannel) -> None:
        with self._closing_channel(live) as why, inside():
            cut(live.channel, why)
