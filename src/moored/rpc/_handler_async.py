"""The channel that users of asyncio hold: the same as `Handler`, over channels of `grpc.aio`.

A call that can begin at once is gRPC's own; one that cannot is a pending one (see `_pending`). All
of it belongs to one loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ._dial import CredentialProvider
from ._errors import ManagerClosed, closed, uncopied
from ._handler import _INHERITED, GRACE, WAIT_LIMIT, _safely
from ._live import Live
from ._methods_async import StreamStream, StreamUnary, UnaryStream, UnaryUnary
from ._refusals import Refusals
from ._secrets import Sent
from ._unsent import AsyncCallUnsent, hopeless, unsent

__all__ = ["AsyncHandler"]

log = logging.getLogger("moored.rpc")


class AsyncHandler(grpc.aio.Channel):  # type: ignore[misc]
    """A channel over whichever connection is the current one.

    :param live: the first generation; without it, calls wait.
    :param credentials: adds to the metadata of each call; it may be awaitable.
    :param wait_limit: how long a call without a timeout waits for a connection.
    :param grace: how long the calls of a replaced generation may still take.
    :param on_rpc_error: told each failed call and its generation.
    :param on_waiting: told +1 and -1 as calls begin and stop to wait.
    :param on_close: awaited instead of closing: the handler may be shared.
    :param now: the time, as its manager has it; how long a call waits is by the loop's.
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
        on_close: Callable[[], Coroutine[Any, Any, object]] | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._live: Live | None = None
        self._now = now or self._loop.time
        self._used_at = self._now()
        self._credentials = credentials
        self._on_rpc_error = on_rpc_error
        self._on_waiting = on_waiting
        self._on_close = on_close
        self._address = address
        self._wait_limit = wait_limit
        self._grace = grace
        self._last_error: BaseException | None = None
        # See `Handler`.
        self._verdicts = 0
        self._verdict: BaseException | None = None
        self._sent = Sent()
        self._closed = False
        self._asleep: int | None = None
        self._own_key: str | None = None
        self._retiring: dict[Live, asyncio.TimerHandle | None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        # Replaced with each change, so that a wait for the next one needs no look at the last.
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._deferred = _is_deferred(credentials)
        # Set by its manager: see `Handler`.
        self._on_unsent: Callable[[BaseException], object] | None = None
        self._on_refused: Callable[[], object] | None = None
        self._refusals: Refusals | None = None
        self._credential = 0
        if live is not None:
            self._swap(live)

    # -- what users see ------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 while there is none."""
        return 0 if self._live is None else self._live.number

    @property
    def address(self) -> str:
        """Where the calls go."""
        return self._address

    @property
    def calls(self) -> int:
        """How many calls are under way, over all generations."""
        lives = [*self._retiring, *([] if self._live is None else [self._live])]
        return sum(len(live.calls) for live in lives)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> UnaryUnary:
        """See `grpc.aio.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return UnaryUnary(self, "unary_unary", how, bool(_registered_method))

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> UnaryStream:
        """See `grpc.aio.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return UnaryStream(self, "unary_stream", how, bool(_registered_method))

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> StreamUnary:
        """See `grpc.aio.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return StreamUnary(self, "stream_unary", how, bool(_registered_method))

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> StreamStream:
        """See `grpc.aio.Channel`."""
        how = (method, request_serializer, response_deserializer)
        return StreamStream(self, "stream_stream", how, bool(_registered_method))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the current connection; CONNECTING while there is none, IDLE if asleep."""
        if self._closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self._asleep is not None:
            if not try_to_connect:
                return grpc.ChannelConnectivity.IDLE
            self._rouse()
        if self._live is None:
            return grpc.ChannelConnectivity.CONNECTING
        return self._live.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state, of this connection or of one that follows it."""
        while self.get_state() is last_observed_state:
            waits: set[asyncio.Future[Any]] = {self._changed}
            inner: asyncio.Task[None] | None = None
            if self._live is not None:
                channel = self._live.channel
                inner = self._loop.create_task(channel.wait_for_state_change(last_observed_state))
                waits.add(inner)
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if inner is not None:
                    inner.cancel()
                    await asyncio.wait([inner])

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        while True:
            state = self.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return
            if self._closed:
                raise self._closed_error()
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Give it back: one that others share stays open for them."""
        if self._on_close is not None:
            await self._on_close()
            return
        self._shut(grace or 0.0)
        await self._wait_closed()

    async def __aenter__(self) -> AsyncHandler:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- what its manager does -----------------------------------------------------------------

    def _swap(self, live: Live) -> None:
        """Make this the current generation; the one before ends its calls, and is closed."""
        if self._closed:
            self._retire(live, 0.0)
            return
        old, self._live = self._live, live
        live.ended = self._counts_out(live, self._credential)
        self._address = live.address
        self._last_error = None
        self._tell_change()
        if old is not None:
            self._retire(old, self._grace)

    def _lose(self, cause: BaseException | None = None) -> None:
        """There is no generation until the next swap: calls wait for it."""
        self._last_error = cause
        old, self._live = self._live, None
        if old is not None:
            self._tell_change()
            self._retire(old, self._grace)

    def _fail_waiting(self, verdict: BaseException) -> None:
        """To wait does not help: the calls that do so fail now."""
        self._verdicts += 1
        self._verdict = verdict
        self._tell_change()

    def _part(self, generation: int) -> AsyncHandler | None:
        """Fall asleep: who is returned has what is open, to be closed. None if there are calls."""
        if self._live is not None and self._live.calls:
            return None
        heir = AsyncHandler(address=self._address, grace=self._grace, now=self._now)
        heir._sent = self._sent
        heir._live, self._live = self._live, None
        self._asleep = generation
        self._tell_change()
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
        self._closed = True
        self._asleep = None
        old, self._live = self._live, None
        self._tell_change()
        if old is not None:
            self._retire(old, self._grace if grace is None else grace)

    async def _wait_closed(self) -> None:
        """Wait until every replaced generation is closed."""
        while self._retiring:
            await asyncio.wait([self._changed])

    def reset(self) -> None:
        """Start anew in a forked child: what it has inherited is neither used nor closed."""
        _INHERITED.extend([*self._retiring, *([] if self._live is None else [self._live])])
        self._live = None
        self._retiring = {}
        self._closing = set()
        if self._refusals is not None:
            self._refusals.abandon()

    # -- a call --------------------------------------------------------------------------------

    async def _next(self, timeout: float | None) -> tuple[Live, float | None]:
        """Wait for a generation; returns it, and the time that the call has left."""
        if (live := self._live) is not None:
            return live, timeout
        began = self._loop.time()
        deadline = began + (self._wait_limit if timeout is None else timeout)
        verdicts = self._verdicts
        self._waiting(+1)
        try:
            while (live := self._live) is None:
                if self._closed:
                    raise self._closed_error()
                if verdicts != self._verdicts and (verdict := self._verdict) is not None:
                    error = AsyncCallUnsent(*hopeless(self._address, verdict))
                    self._unsent(error)
                    raise error from verdict
                if (left := deadline - self._loop.time()) <= 0:
                    waited, own = self._loop.time() - began, timeout is not None
                    error = AsyncCallUnsent(*unsent(self._address, waited, own, self._last_error))
                    self._unsent(error)
                    raise error
                await asyncio.wait([self._changed], timeout=left)
        finally:
            self._waiting(-1)
        return live, None if timeout is None else max(0.0, deadline - self._loop.time())

    async def _await_change(self, seen: Live | None, timeout: float) -> bool:
        """Wait until another generation is the current one; says whether it is."""
        deadline = self._loop.time() + timeout
        while not self._closed and (self._live is None or self._live is seen):
            if (left := deadline - self._loop.time()) <= 0:
                return False
            await asyncio.wait([self._changed], timeout=left)
        return True

    async def _sign_later(self, metadata: Any, timeout: float | None) -> Any:
        """The call's metadata, with that of credentials that must be awaited."""
        assert self._credentials is not None
        try:
            async with asyncio.timeout(timeout):
                added = self._credentials.metadata()
                added = await added if inspect.isawaitable(added) else added
                self._sent.add(added)
                return _joined(metadata, added)
        except TimeoutError:
            text = "not sent: its time was over before the credentials were there"
            error = AsyncCallUnsent(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            self._unsent(error)
            raise error from None

    def _signed(self, metadata: Any) -> Any:
        if self._credentials is None:
            return metadata
        added = self._credentials.metadata()
        self._sent.add(added)
        return _joined(metadata, added)

    def _waiting(self, change: int) -> None:
        if self._on_waiting is not None:
            _safely(self._sent, self._on_waiting, change)

    def _unsent(self, error: AsyncCallUnsent) -> None:
        if self._on_unsent is not None:
            _safely(self._sent, self._on_unsent, error)

    def _counts_out(self, live: Live, credential: int) -> Callable[[Any], None]:
        """What is called when a call of this generation, made with these credentials, is over.

        It is called for each, so it is short.
        """
        calls, fine = live.calls, grpc.StatusCode.OK

        def ended(call: Any) -> None:
            calls.pop()
            if live.watcher is not None:
                live.watcher(live)
            try:
                call.code().send(None)
            except StopIteration as known:
                if known.value is not fine:
                    self._failed(call, live, credential)
            except Exception:  # an interceptor's own, which its caller gets as well
                pass

        return ended

    def _failed(self, call: Any, live: Live, credential: int) -> None:
        if call.cancelled():
            return
        error = _error_of(call)
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
        if self._refusals.refuse(credential, self._now()) and self._on_refused is not None:
            _safely(self._sent, self._on_refused)

    def _renewed(self, error: BaseException | None) -> None:
        """The credentials were refreshed, or could not be."""
        assert self._refusals is not None
        self._refusals.refreshed(error, self._now())
        self._credential = self._refusals.number
        if (live := self._live) is not None:
            live.ended = self._counts_out(live, self._credential)
        self._tell_change()

    async def _await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh that is under way; says whether a refused call may be made again."""
        if (refusals := self._refusals) is None:
            return False
        deadline = None if timeout is None else self._loop.time() + timeout
        while refusals.refreshing and not self._closed:
            left = None if deadline is None else deadline - self._loop.time()
            if left is not None and left <= 0:
                break
            await asyncio.wait([self._changed], timeout=left)
        return refusals.mended and not self._closed

    def _closed_error(self) -> ManagerClosed:
        return closed(self._address)

    # -- generations ---------------------------------------------------------------------------

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    def _retire(self, live: Live, grace: float) -> None:
        live.retired = True
        live.watcher = self._call_ended
        over = grace <= 0 or not live.calls
        timer = None if over else self._loop.call_later(grace, self._close_live, live)
        self._retiring[live] = timer
        if over:
            self._close_live(live)

    def _call_ended(self, live: Live) -> None:
        if live.calls:
            return
        try:  # the garbage collector may end a call, and in any thread
            self._loop.call_soon_threadsafe(self._close_live, live)
        except RuntimeError:  # the loop is closed, and the channel with it
            pass

    def _close_live(self, live: Live) -> None:
        if live.closed or live not in self._retiring:
            return
        live.closed = True
        if (timer := self._retiring[live]) is not None:
            timer.cancel()
        task = self._loop.create_task(self._close_channel(live))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_channel(self, live: Live) -> None:
        try:
            await live.channel.close()
        except Exception:
            log.exception("closing generation %d to %s", live.number, live.address)
        finally:
            self._retiring.pop(live, None)
            self._tell_change()

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        state = "no connection" if self._live is None else f"generation {self._live.number}"
        state = "asleep" if self._asleep is not None else state
        state = "closed" if self._closed else state
        return f"<AsyncHandler to {self._address}: {state}, {self.calls} calls>"


def _is_deferred(credentials: CredentialProvider | None) -> bool:
    return credentials is not None and inspect.iscoroutinefunction(credentials.metadata)


def _joined(metadata: Any, added: Any) -> Any:
    return (*metadata, *added) if metadata else tuple(added)


def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """What a call that is over has failed with."""
    return grpc.aio.AioRpcError(
        _now(call.code()),
        _now(call.initial_metadata()),
        _now(call.trailing_metadata()),
        _now(call.details()),
        _now(call.debug_error_string()),
    )


def _now(asked: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for; None if it has."""
    try:
        asked.send(None)
    except StopIteration as known:
        return known.value
    asked.close()
    return None
