"""The channel that users hold: it stays valid while the real one in it is replaced.

It is a `grpc.Channel`: generated stubs and `grpc.intercept_channel` take it. Behind it is one
generation at a time, a `Live`. What holds:

- a call belongs to the generation that was current when it began, and ends there;
- where there is no generation, a call waits for one; its own timeout is the limit, and what is
  left of it goes to the real call;
- a call that failed is raised to its caller, never repeated; the manager is told;
- a replaced generation is closed when its last call has ended, or when the grace is over;
- one whose connection was closed because nobody seemed to have it is asleep: a call wakes it.

While it waits, `future()` and the calls with streams hold their thread too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]

from moored.kernel import LoopThread, start_thread

from ._dial import CredentialProvider
from ._errors import ConfigError, closed, uncopied
from ._fork import inside, is_watched, refuse_broken
from ._live import Live
from ._methods import StreamStream, StreamUnary, UnaryStream, UnaryUnary
from ._refusals import Refusals
from ._secrets import Sent, secrets_of, trace
from ._unsent import CallUnsent, hopeless, in_vain, unsent

__all__ = ["Handler", "call_later"]

log = logging.getLogger("moored.rpc")

#: How long a call that has no timeout waits for a connection.
WAIT_LIMIT = 10.0
#: How long the calls of a replaced generation may still take.
GRACE = 30.0

#: What a forked child has inherited: it may neither use it nor free it.
_INHERITED: list[Live] = []

Connectivity = Callable[[grpc.ChannelConnectivity], None]
Later = Callable[[float, Callable[[], None]], Callable[[], object]]


def call_later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
    """Do it in a while, on the loop thread, or at once, in a thread of its own, where it may block.

    Returns what calls it off. While the interpreter ends, nothing is done: no thread can start.
    """
    if sys.is_finalizing():
        return _nothing
    if delay <= 0:
        start_thread(act, name="moored-rpc-close")
        return _nothing

    async def wait() -> None:
        await asyncio.sleep(delay)
        act()

    return LoopThread.shared().submit(wait()).cancel


class Handler(grpc.Channel):  # type: ignore[misc]
    """A channel over whichever connection is the current one.

    :param live: the first generation; without it, calls wait.
    :param credentials: adds to the metadata of each call.
    :param wait_limit: how long a call without a timeout waits for a connection.
    :param grace: how long the calls of a replaced generation may still take.
    :param on_rpc_error: told each failed call and its generation; it must not block.
    :param on_waiting: told +1 and -1 as calls begin and stop to wait; it must not block.
    :param on_close: called instead of closing: the handler may be shared.
    :param later: does something in a while, off this thread.
    :param now: the time, as its manager has it; how long a call waits is by the system's.
    """

    def __init__(
        self,
        live: Live | None = None,
        *,
        address: str = "",
        credentials: CredentialProvider | None = None,
        wait_limit: float = WAIT_LIMIT,
        grace: float = GRACE,
        on_rpc_error: Callable[[grpc.RpcError, int], object] | None = None,
        on_waiting: Callable[[int], object] | None = None,
        on_close: Callable[[], object] | None = None,
        later: Later = call_later,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._live = live
        self._now = now
        self._used_at = now()
        self._credentials = credentials
        self._on_rpc_error = on_rpc_error
        self._on_waiting = on_waiting
        self._on_close = on_close
        self._address = live.address if live is not None else address
        self._wait_limit = wait_limit
        self._grace = grace
        self._later = later
        self._last_error: BaseException | None = None
        #: How often it was said that to wait does not help, and why the last time.
        self._verdicts = 0
        self._verdict: BaseException | None = None
        self._sent = Sent()
        self._closed = False
        #: While it has no connection, as nobody seemed to have it: the last generation before.
        self._asleep: int | None = None
        #: And if nobody shares it, its key.
        self._own_key: str | None = None
        # Set by its manager: told of calls that were not sent, and of credentials that the server
        # has refused, as what decides about those says.
        self._on_unsent: Callable[[BaseException], object] | None = None
        self._on_refused: Callable[[], object] | None = None
        self._refusals: Refusals | None = None
        # Whether no connection can come while this thread waits: it has a lock that is needed.
        self._is_in_vain: Callable[[], bool] | None = None
        #: Which credentials a call is made with.
        self._credential = 0
        # While the gate is shut, the current generation stands here.
        self._parked: Live | None = None
        self._gated = False
        self._retiring: dict[Live, Callable[[], object]] = {}
        self._subscribers: list[Connectivity] = []
        # Reentrant: the garbage collector may end a call anywhere.
        self._changed = threading.Condition(threading.RLock())

    # -- what users see ------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 while there is none."""
        live = self._live or self._parked
        return 0 if live is None else live.number

    @property
    def address(self) -> str:
        """Where the calls go."""
        return self._address

    @property
    def calls(self) -> int:
        """How many calls are under way, over all generations."""
        with self._changed:
            return sum(len(live.calls) for live in self._lives())

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> UnaryUnary:
        """See `grpc.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return UnaryUnary(self, "unary_unary", how, bool(_registered_method))

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> UnaryStream:
        """See `grpc.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return UnaryStream(self, "unary_stream", how, bool(_registered_method))

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> StreamUnary:
        """See `grpc.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return StreamUnary(self, "stream_unary", how, bool(_registered_method))

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> StreamStream:
        """See `grpc.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return StreamStream(self, "stream_stream", how, bool(_registered_method))

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None = False) -> None:
        """Be told the state of the current connection, and of each that follows it."""
        if try_to_connect and self._asleep is not None:
            self._rouse()
        with self._changed:
            self._subscribers.append(callback)
            live = self._live
            if live is not None:
                live.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Not any more."""
        with self._changed:
            if callback not in self._subscribers:
                return
            self._subscribers.remove(callback)
            live = self._live or self._parked
            if live is not None:
                live.channel.unsubscribe(callback)

    def close(self) -> None:
        """Give it back: one that others share stays open for them."""
        if self._on_close is not None:
            self._on_close()
        else:
            self._shut(0.0)

    def __enter__(self) -> Handler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what its manager does -----------------------------------------------------------------

    def _swap(self, live: Live) -> None:
        """Make this the current generation; the one before ends its calls, and is closed."""
        with self._changed:
            if self._closed:
                self._retire(live, 0.0)
                return
            old = self._take()
            self._address = live.address
            self._last_error = None
            self._put(live)
            self._follow(old, live)
            self._changed.notify_all()
            if old is not None:
                self._retire(old, self._grace)

    def _lose(self, cause: BaseException | None = None) -> None:
        """There is no generation until the next swap: calls wait for it."""
        with self._changed:
            self._last_error = cause
            if (old := self._take()) is not None:
                self._follow(old, None)
                self._retire(old, self._grace)

    def _fail_waiting(self, verdict: BaseException) -> None:
        """To wait does not help: the calls that do so fail now."""
        with self._changed:
            self._verdicts += 1
            self._verdict = verdict
            self._changed.notify_all()

    def _part(self, generation: int) -> Handler | None:
        """Fall asleep: who is returned has what is open, to be closed. None if there are calls."""
        heir = Handler(address=self._address, grace=self._grace, later=self._later, now=self._now)
        heir._sent = self._sent
        with self._changed:
            if (live := self._take()) is not None:
                if live.calls:
                    self._put(live)
                    self._changed.notify_all()
                    return None
                self._follow(live, None)
                heir._live = live
            self._asleep = generation
        return heir

    @property
    def _is_open(self) -> bool:
        return not self._closed and self._asleep is None

    def _rouse(self) -> None:
        """Have a connection opened, without waiting for it."""
        self._waiting(+1)
        self._waiting(-1)

    def _shut(self, grace: float | None = None) -> None:
        """No more calls; those under way may take as long as the grace."""
        with self._changed:
            self._closed = True
            self._asleep = None
            self._subscribers.clear()
            if (old := self._take()) is not None:
                self._retire(old, self._grace if grace is None else grace)
            self._changed.notify_all()

    def _wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until every replaced generation is closed; says whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._retiring, timeout)

    # -- around a fork -------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Let no call begin, and wait for those under way; says whether all have ended."""
        deadline = monotonic() + timeout
        with self._changed:
            self._gated = True
            if self._live is not None:
                self._parked, self._live = self._live, None
                self._follow(self._parked, None)
            for live in self._lives():
                live.watcher = self._call_ended
            while any(live.calls or is_watched(live.channel) for live in self._lives()):
                if (left := deadline - monotonic()) <= 0:
                    return False
                # A call that the garbage collector has ended tells nobody.
                self._changed.wait(min(left, 0.05))
            return True

    def resume(self) -> None:
        """Calls may begin again: in the parent, after the fork."""
        with self._changed:
            self._gated = False
            if (live := self._parked) is not None:
                self._parked = None
                live.watcher = None
                self._live = live
                self._follow(None, live)
                self._changed.notify_all()

    def reset(self) -> None:
        """Start anew in a forked child: what it has inherited is neither used nor closed."""
        _INHERITED.extend(self._lives())
        self._live = self._parked = None
        self._gated = False
        if self._refusals is not None:
            self._refusals.abandon()
        self._retiring = {}
        self._subscribers = []
        self._changed = threading.Condition(threading.RLock())

    # -- a call --------------------------------------------------------------------------------

    def _enter(self, timeout: float | None) -> tuple[Live, float | None]:
        """Count a call; returns where it goes, and the time that it has left."""
        self._used_at = self._now()
        live = self._live
        if live is not None:
            live.calls.append(None)
            if self._live is live:
                return live, timeout
            live.leave()
        return self._wait(timeout)

    def _wait(self, timeout: float | None) -> tuple[Live, float | None]:
        began = monotonic()
        deadline = began + (self._wait_limit if timeout is None else timeout)
        verdicts = self._verdicts
        if self._in_vain():
            raise CallUnsent(*in_vain(self._address))
        self._waiting(+1)
        try:
            while True:
                live = self._next(began, deadline, timeout is not None, verdicts)
                live.calls.append(None)
                if self._live is live:
                    left = None if timeout is None else max(0.0, deadline - monotonic())
                    return live, left
                live.leave()
        except CallUnsent as error:
            if self._on_unsent is not None:
                _safely(self._sent, self._on_unsent, error)
            raise
        finally:
            self._waiting(-1)

    def _in_vain(self) -> bool:
        return self._is_in_vain is not None and self._is_in_vain()

    def _next(self, began: float, deadline: float, own: bool, verdicts: int) -> Live:
        with self._changed:
            while (live := self._live) is None:
                if self._closed:
                    raise closed(self._address)
                if verdicts != self._verdicts and self._verdict is not None:
                    raise CallUnsent(*hopeless(self._address, self._verdict)) from self._verdict
                refuse_broken()
                if (left := deadline - monotonic()) <= 0:
                    waited = monotonic() - began
                    raise CallUnsent(*unsent(self._address, waited, own, self._last_error))
                self._changed.wait(left)
            return live

    def _await_change(self, seen: Live | None, timeout: float) -> bool:
        """Wait until another generation is the current one; says whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (self._live is not None and self._live is not seen),
                timeout,
            )

    def _waiting(self, change: int) -> None:
        if self._on_waiting is not None:
            _safely(self._sent, self._on_waiting, change)

    def _failed(self, error: grpc.RpcError, live: Live, credential: int) -> None:
        if self._refusals is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._refused(credential)
        if self._on_rpc_error is not None:
            _safely(self._sent, self._on_rpc_error, error, live.number)

    def _refused_elsewhere(self) -> None:
        """The credentials were refused, but not by a call."""
        if self._refusals is not None:
            self._refused(self._credential)

    def _refused(self, credential: int) -> None:
        assert self._refusals is not None
        with self._changed:
            refresh = self._refusals.refuse(credential, self._now())
        if refresh and self._on_refused is not None:
            _safely(self._sent, self._on_refused)

    def _renewed(self, error: BaseException | None) -> None:
        """The credentials were refreshed, or could not be."""
        assert self._refusals is not None
        with self._changed:
            self._refusals.refreshed(error, self._now())
            self._credential = self._refusals.number
            self._changed.notify_all()

    def _await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh that is under way; says whether a refused call may be made again."""
        if self._in_vain():
            return False
        with self._changed:
            if (refusals := self._refusals) is None:
                return False
            self._changed.wait_for(lambda: self._closed or not refusals.refreshing, timeout)
            return refusals.mended and not self._closed

    def _signed(self, metadata: Any) -> Any:
        """The call's metadata, with that of the credentials."""
        if self._credentials is None:
            return metadata
        added = self._credentials.metadata()
        if not isinstance(added, (tuple, list)):
            if hasattr(added, "close"):
                added.close()
            raise ConfigError("credentials that must be awaited are for asyncio only")
        self._sent.add(added)
        return (*metadata, *added) if metadata else tuple(added)

    # -- generations, under the lock -----------------------------------------------------------

    def _lives(self) -> list[Live]:
        current = self._live or self._parked
        return [*self._retiring, *([] if current is None else [current])]

    def _take(self) -> Live | None:
        old = self._live or self._parked
        self._live = self._parked = None
        return old

    def _put(self, live: Live) -> None:
        if self._gated:
            live.watcher = self._call_ended
            self._parked = live
        else:
            self._live = live

    def _follow(self, old: Live | None, new: Live | None) -> None:
        for callback in self._subscribers:
            if old is not None:
                old.channel.unsubscribe(callback)
            if new is not None and not self._gated:
                # It is connected. To ask for that, and to close it soon after, is more than
                # gRPC's thread that watches it can bear: it ends with a traceback.
                new.channel.subscribe(callback, False)

    def _retire(self, live: Live, grace: float) -> None:
        live.retired = True
        live.watcher = self._call_ended
        over = partial(self._close_live, live)
        self._retiring[live] = self._later(grace, over) if live.calls and grace > 0 else _nothing
        if grace <= 0 or not live.calls:
            over()

    def _call_ended(self, live: Live) -> None:
        if live.calls:
            return
        with self._changed:
            self._changed.notify_all()
        if live.retired:
            self._close_live(live)

    def _close_live(self, live: Live) -> None:
        with self._changed:
            if live.closed or live not in self._retiring:
                return
            live.closed = True
            self._retiring[live]()
        # Closing may take a while, and the thread may be one that the channel itself needs.
        self._later(0.0, partial(self._close_channel, live))

    def _close_channel(self, live: Live) -> None:
        try:
            with inside():
                live.channel.close()
        except Exception:
            log.exception("closing generation %d to %s", live.number, live.address)
        finally:
            with self._changed:
                self._retiring.pop(live, None)
                self._changed.notify_all()

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        live = self._live or self._parked
        state = "no connection" if live is None else f"generation {live.number}"
        state = "asleep" if self._asleep is not None else state
        state = "closed" if self._closed else state
        return f"<Handler to {self._address}: {state}, {self.calls} calls>"


def _nothing() -> None:
    pass


def _safely(sent: Sent, tell: Callable[..., object], *given: Any) -> None:
    """A defect of who is told must not change what a caller sees."""
    try:
        tell(*given)
    except Exception as error:
        # Not with the call's own error, while which is handled: it may repeat the token.
        log.error("telling of a call\n%s", trace(error, secrets_of("", *sent.lately)))
