"""Where calls begin: over the current channel of an endpoint, or after a wait for one.

A gate holds no state of the connection, which is the `Endpoint`'s: it lets calls begin, wakes those
that wait, and reports those that fail. Invariants:

- a call belongs to the channel that was current when it began, and ends there;
- without a channel, a call waits for one within its own timeout, and passes the rest of that
  timeout to the real call;
- a failed call raises in its caller, is reported to the loop, and is never retried.

With threads, a unary call waits in its thread; `future()` and calls with streams return at once,
and begin when there is a channel (see `_pending_sync`). With asyncio, a call that can begin at once
is gRPC's own object, and one that must wait is a pending call (see `_pending`).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Deadline, LoopThread, awaited, start_thread

from ._channel_pool import Connectivity
from ._clients import Clients
from ._dial import CredentialProvider
from ._endpoint import Endpoint, Live
from ._errors import ConfigError, ManagerClosed, closed
from ._fork import keep, leaves_soon, must_not_wait, refuse_broken, register
from ._grpc_internals import make_cuttable
from ._secrets import Sent
from .calls._pending_sync import PendingCall, fail_pending, start_pending
from .calls._unsent import AsyncCallUnsent, CallUnsent, cannot_connect, from_finalizer, unsent

if TYPE_CHECKING:
    from ._background import Background

__all__ = ["AsyncGate", "BaseGate", "Gate", "call_later"]

Later = Callable[[float, Callable[[], None]], Callable[[], object]]

#: Seconds that a call without a timeout waits for a connection.
WAIT_LIMIT = 10.0


class BaseGate:
    """What the gates for threads and for asyncio have in common.

    :param background: carries out what a call causes, on the loop.
    :param credentials: adds to the metadata of each call.
    :param wait_limit: how long a call without a timeout waits for a connection.
    :param now: the manager's clock; timeouts of calls use the system's, or the loop's.
    """

    #: The class of the error of a call that was not sent.
    unsent_error: type[CallUnsent] | type[AsyncCallUnsent]

    def __init__(
        self,
        endpoint: Endpoint,
        background: Background,
        *,
        credentials: CredentialProvider | None = None,
        wait_limit: float = WAIT_LIMIT,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.background = background
        #: Tells the endpoint of an event: on the loop at once, and from a thread soon.
        self.tell: Callable[..., object] = partial(background.tell, endpoint)
        self.credentials = credentials
        self.wait_limit = wait_limit
        self.now = now
        #: The current channel; written on the loop, read by all.
        self.live: Live | None = None
        #: The number of the credentials of the next call.
        self.credential = 0
        #: When the last call was made.
        self.used_at = now()
        #: The metadata of recent calls, which may be secret.
        self.sent = Sent()

    @property
    def calls(self) -> int:
        """The number of calls in flight, also over replaced channels."""
        live, old = self.live, list(self.endpoint.old)
        return sum(len(each.calls) for each in (old if live is None else [*old, live]))

    def put(self) -> None:
        """Let calls begin over the current channel of the endpoint; on the loop."""
        raise NotImplementedError

    def notify(self) -> None:
        """Wake the calls that wait, so that each looks at the endpoint again; on the loop."""
        raise NotImplementedError

    def fail(self, verdict: BaseException) -> None:
        """Fail the calls that wait: no connection can be made; on the loop."""
        self.notify()

    def shut(self) -> None:
        """Refuse all calls, because the endpoint is closed; on the loop."""
        self.put()

    def refuse(self) -> None:
        """Refuse calls from now on, also while the loop has not closed the endpoint yet."""

    def watch(self, live: Live) -> None:
        """Tell the endpoint when the last call of a replaced channel has ended."""
        live.watch(self._call_ended)
        if not live.calls:
            self.tell(self.endpoint.ended, live)

    def _call_ended(self, live: Live) -> None:
        if not live.calls:
            self.tell(self.endpoint.ended, live)

    def why_unsent(
        self, verdicts: int, began: float, deadline: float, now: float, own: bool
    ) -> Exception | None:
        """Return the error of a call that cannot wait any longer; None if it can.

        :param verdicts: how many times waiting calls had been failed when the call began to wait.
        :param own: whether the deadline is the call's own timeout.
        """
        endpoint = self.endpoint
        if endpoint.closed:
            return self.closed_error()
        if verdicts != endpoint.verdicts and (verdict := endpoint.verdict) is not None:
            error = self.unsent_error(*cannot_connect(endpoint.address, verdict))
            error.__cause__ = verdict
        elif now >= deadline:
            reason = unsent(endpoint.address, now - began, own, endpoint.last_error)
            error = self.unsent_error(*reason)
        else:
            return None
        self.tell(endpoint.unsent, error)
        return error

    def closed_error(self) -> ManagerClosed:
        """Return the error of a call over a closed channel."""
        return closed(self.endpoint.address)

    def joined(self, metadata: Any, added: Any) -> Any:
        """Return the metadata of a call with those of the credentials."""
        self.sent.add(added)
        return (*metadata, *added) if metadata else tuple(added)

    def report(self, error: grpc.RpcError, live: Live, credential: int) -> None:
        """Report a failed call."""
        self.background.call_failed(self.endpoint, error, live, credential)


def call_later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
    """Call a function after a delay on the loop thread, or at once in a thread of its own.

    Return a function that cancels it. During interpreter shutdown nothing is called: no thread can
    be started.
    """
    if sys.is_finalizing():
        return _nothing
    if delay <= 0:
        start_thread(act, name="moored-rpc-call")
        return _nothing

    async def wait() -> None:
        await asyncio.sleep(delay)
        act()

    return LoopThread.shared().submit(wait()).cancel


class Gate(BaseGate):
    """The gate for threads. Its condition only wakes; it guards no state of the connection."""

    unsent_error = CallUnsent

    def __init__(self, *given: Any, later: Later = call_later, **options: Any) -> None:
        super().__init__(*given, **options)
        self.serve(self.background)
        #: Calls a function after a delay, in another thread.
        self.later = later
        #: Whether the only client of a dedicated connection has released it.
        self.released = False
        #: Futures and streams without a channel yet.
        self.pending: list[PendingCall] = []
        #: The same, and those that a thread has taken from there to start them.
        self.unsettled: Clients[PendingCall] = Clients()
        self._subscribers: list[Connectivity] = []
        self._followed: Live | None = None
        # Reentrant: the garbage collector may end a call anywhere.
        self.changed = threading.Condition(threading.RLock())
        register(self)

    # -- on the loop ---------------------------------------------------------------------------

    def put(self) -> None:
        """Let calls begin over the current channel of the endpoint."""
        endpoint = self.endpoint
        with self.changed:
            self.credential = endpoint.credential
            self.live = live = endpoint.live
            if endpoint.closed and self._subscribers:
                self._subscribers.clear()
                leaves_soon()
            self.changed.notify_all()
        start_pending(self)
        if live is not self._followed:
            self._follow(live)

    def notify(self) -> None:
        """Wake the calls that wait."""
        with self.changed:
            self.changed.notify_all()

    def fail(self, verdict: BaseException) -> None:
        """Fail the calls that wait."""
        self.notify()
        fail_pending(self, verdict)

    def _follow(self, live: Live | None) -> None:
        """Move the connectivity callbacks to another channel."""
        with self.changed:
            old, self._followed = self._followed, live
            for callback in self._subscribers:
                if old is not None:
                    old.channel.unsubscribe(callback)
                if live is not None:
                    # Without try_to_connect: it is connected, and gRPC's watcher thread would fail
                    # with a traceback if the channel was closed soon after.
                    live.channel.subscribe(callback, False)

    # -- callers -------------------------------------------------------------------------------

    def enter(self, timeout: float | None) -> tuple[Live, float | None]:
        """Count a new call; return its channel, and the rest of its timeout."""
        live = self.enter_now()
        return (live, timeout) if live is not None else self._wait(timeout)

    def enter_now(self) -> Live | None:
        """Count a new call over the current channel; return None if there is none."""
        self.used_at = self.now()
        live = self.live
        if live is not None and not self.released:
            live.calls.append(None)
            if self.live is live:
                return live
            live.leave()
        return None

    def _wait(self, timeout: float | None) -> tuple[Live, float | None]:
        began = monotonic()
        deadline = began + (self.wait_limit if timeout is None else timeout)
        endpoint, own = self.endpoint, timeout is not None
        verdicts = endpoint.verdicts
        if must_not_wait():
            raise CallUnsent(*from_finalizer(endpoint.address))
        refuse_broken()  # first: otherwise a connection would be opened for the call
        self.tell(endpoint.call_waits)
        try:
            while True:
                with self.changed:
                    while (live := self.live) is None or self.released:
                        now = monotonic()
                        error = self.why_unsent(verdicts, began, deadline, now, own)
                        if error is not None:
                            raise error
                        self.changed.wait(deadline - now)
                live.calls.append(None)
                if self.live is live:
                    return live, max(0.0, deadline - monotonic()) if own else None
                live.leave()
        finally:
            self.tell(endpoint.leaves)

    def why_unsent(self, *given: Any) -> Exception | None:
        """Return the error of a call that cannot wait any longer; None if it can."""
        return self.closed_error() if self.released else super().why_unsent(*given)

    def call_over(self, call: Any, live: Live, credential: int) -> None:
        """Note how a future or a stream has ended."""
        if call.cancelled():
            return
        if isinstance(call, grpc.RpcError) and call.code() is not grpc.StatusCode.OK:
            self.report(call, live, credential)
        elif live.unavailable:
            live.unavailable.clear()

    def settle(self) -> None:
        """Wait until the loop knows what this thread has reported, but not for long."""
        self.background.settle()

    def refuse(self) -> None:
        """Refuse calls from now on, also while the loop has not closed the endpoint yet."""
        self.released = True

    def await_change(self, seen: Live | None, timeout: float) -> bool:
        """Wait for another current channel; return whether there is one."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self.endpoint.closed or (self.live is not None and self.live is not seen),
                timeout,
            )

    def await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh in progress; return whether a refused call may be retried."""
        if must_not_wait() or self.endpoint.refusals is None:
            return False
        self.settle()  # so that the refusal of this call is known
        endpoint = self.endpoint
        with self.changed:
            self.changed.wait_for(lambda: endpoint.closed or not endpoint.refreshes, timeout)
        return endpoint.mended and not endpoint.closed

    def signed(self, metadata: Any) -> Any:
        """Return the call's metadata and those of the credentials."""
        if self.credentials is None:
            return metadata
        added = self.credentials.metadata()
        if not isinstance(added, (tuple, list)):
            if hasattr(added, "close"):
                added.close()
            raise ConfigError("credentials that must be awaited are for asyncio only")
        return self.joined(metadata, added)

    # -- connectivity --------------------------------------------------------------------------

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None) -> None:
        """Call back with the state of the current channel, and of those that follow it."""
        if try_to_connect and self.live is None:
            refuse_broken()
            self.tell(self.endpoint.connect)
        with self.changed:
            self._subscribers.append(callback)
            if (live := self._followed) is not None:
                live.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Remove a connectivity callback."""
        with self.changed:
            if callback not in self._subscribers:
                return
            leaves_soon()
            self._subscribers.remove(callback)
            if (live := self._followed) is not None:
                live.channel.unsubscribe(callback)

    # -- in the child of a fork ----------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether a thread of gRPC may be watching the state of the channel."""
        return bool(self._subscribers)

    def serve(self, background: Background) -> None:
        """Report to the manager's background of this process."""
        self.background = background
        self.tell = partial(background.post, self.endpoint)

    def reset(self) -> None:
        """Begin anew: the channels, and the calls that wait, are the parent's."""
        keep((self.live, self._followed, list(self.endpoint.old)))
        self.live = self._followed = None
        self.changed = threading.Condition(threading.RLock())
        for call in self.unsettled:
            call.abandon()
        self.pending, self.unsettled = [], Clients()
        self._subscribers = []


class AsyncGate(BaseGate):
    """The gate for asyncio."""

    unsent_error = AsyncCallUnsent

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.loop = asyncio.get_running_loop()
        #: Whether the credentials must be awaited.
        self.deferred = inspect.iscoroutinefunction(getattr(self.credentials, "metadata", None))
        #: The done callback of calls that begin now.
        self.ended: Callable[[Any], None] | None = None
        #: Done at the next change, and then replaced.
        self.changed: asyncio.Future[None] = self.loop.create_future()

    def put(self) -> None:
        """Let calls begin over the current channel of the endpoint."""
        self.credential = self.endpoint.credential
        live = self.endpoint.live
        if live is not None:
            if live is not self.live:
                make_cuttable(live.channel)
            self.ended = self.counts_out(live, self.credential)
        self.live = live
        changed, self.changed = self.changed, self.loop.create_future()
        changed.set_result(None)

    def _call_ended(self, live: Live) -> None:
        if not live.calls:
            with suppress(RuntimeError):  # the loop is closed, and the channel with it
                self.loop.call_soon_threadsafe(self.tell, self.endpoint.ended, live)

    def notify(self) -> None:
        """Wake the calls that wait."""
        changed, self.changed = self.changed, self.loop.create_future()
        changed.set_result(None)

    # -- callers -------------------------------------------------------------------------------

    def enter_now(self) -> Live | None:
        """Note a new call; return the current channel, or None if there is none."""
        self.used_at = self.now()
        return self.live

    async def enter(self, timeout: float | None) -> tuple[Live, float | None]:
        """Wait for a channel; return it, and the rest of the call's timeout."""
        if (live := self.live) is not None:
            return live, timeout
        refuse_broken()
        began = self.loop.time()
        deadline = began + (self.wait_limit if timeout is None else timeout)
        endpoint, own = self.endpoint, timeout is not None
        verdicts = endpoint.verdicts
        self.tell(endpoint.call_waits)
        try:
            while (live := self.live) is None:
                now = self.loop.time()
                if (error := self.why_unsent(verdicts, began, deadline, now, own)) is not None:
                    raise error
                await asyncio.wait([self.changed], timeout=deadline - now)
        finally:
            self.tell(endpoint.leaves)
        return live, max(0.0, deadline - self.loop.time()) if own else None

    async def await_change(self, seen: Live | None, timeout: float) -> bool:
        """Wait for another current channel; return whether there is one."""
        return await self.until(
            lambda: self.endpoint.closed or (self.live is not None and self.live is not seen),
            timeout,
        )

    async def await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh in progress; return whether a refused call may be retried."""
        endpoint = self.endpoint
        if endpoint.refusals is None:
            return False
        await self.until(lambda: endpoint.closed or not endpoint.refreshes, timeout)
        return endpoint.mended and not endpoint.closed

    async def until(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds; return whether it does."""
        deadline = Deadline.after(timeout)
        while not holds():
            if deadline.expired:
                return False
            await asyncio.wait([self.changed], timeout=deadline.timeout)
        return True

    def signed(self, metadata: Any) -> Any:
        """Return the call's metadata and those of the credentials."""
        if self.credentials is None:
            return metadata
        return self.joined(metadata, self.credentials.metadata())

    async def sign_later(self, metadata: Any, timeout: float | None) -> Any:
        """Return the call's metadata and those of credentials that must be awaited."""
        assert self.credentials is not None
        try:
            async with asyncio.timeout(timeout):
                return self.joined(metadata, await awaited(self.credentials.metadata()))
        except TimeoutError:
            text = "not sent: the timeout expired before the credentials were available"
            error = AsyncCallUnsent(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            self.tell(self.endpoint.unsent, error)
            raise error from None

    def counts_out(self, live: Live, credential: int) -> Callable[[Any], None]:
        """Return the done callback for calls over this channel with these credentials.

        It is short because every call runs it.
        """
        calls, unavailable, fine = live.calls, live.unavailable, grpc.StatusCode.OK

        def ended(call: Any) -> None:
            calls.pop()
            if live.watcher is not None:
                live.watcher(live)
            try:
                call.code().send(None)
            except StopIteration as known:
                if known.value is fine:
                    if unavailable:
                        unavailable.clear()
                elif not call.cancelled():
                    error = _error_of(call)
                    self.background.call_failed(self.endpoint, error, live, credential)
            except Exception:  # from an interceptor; the caller gets it as well
                pass

        return ended


def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the error of a call that has failed: its coroutines do not suspend."""
    parts: list[Any] = []
    for asked in (
        *(call.code(), call.initial_metadata(), call.trailing_metadata()),
        *(call.details(), call.debug_error_string()),
    ):
        try:
            asked.send(None)
        except StopIteration as known:
            parts.append(known.value)
        else:
            asked.close()
            parts.append(None)
    return grpc.aio.AioRpcError(*parts)


def _nothing() -> None:
    """Do nothing."""
