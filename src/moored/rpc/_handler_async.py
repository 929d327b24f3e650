"""The `grpc.aio.Channel` that users hold: see `_handler`, which is the same for threads.

A call that can begin at once is gRPC's own object; one that must wait is a pending call (see
`_pending`). A handler belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Deadline, Tasks, awaited, first_of

from ._dial import CredentialProvider
from ._generations import Generations
from ._grpc_internals import cut_async, make_cuttable
from ._live_channel import LiveChannel
from .calls._kinds import FourKinds
from .calls._methods import async_method
from .calls._unsent import AsyncCallUnsent

__all__ = ["AsyncHandler"]


class AsyncHandler(Generations, FourKinds, grpc.aio.Channel):  # type: ignore[misc]
    """A channel over the current connection of a manager.

    :param credentials: adds to the metadata of each call; its `metadata` may be async.
    :param wait_limit: how long a call without a timeout waits for a connection.
    :param grace: how long the calls of a replaced generation may still take, unless its connection
        is alive and leads to a server that is still wanted.
    :param now: the manager's clock; timeouts of calls use the loop's.
    """

    _unsent_error = AsyncCallUnsent

    def __init__(
        self,
        *,
        credentials: CredentialProvider | None = None,
        now: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = Tasks()
        # Done at the next change, and then replaced.
        self._changed: asyncio.Future[None] = self._loop.create_future()
        # Whether the credentials must be awaited.
        self._deferred = inspect.iscoroutinefunction(getattr(credentials, "metadata", None))
        super().__init__(credentials=credentials, now=now or self._loop.time, **options)

    # -- for users -----------------------------------------------------------------------------

    _method = async_method

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection: CONNECTING while there is none, IDLE if asleep."""
        if self._closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self._asleep is not None:
            if not try_to_connect:
                return grpc.ChannelConnectivity.IDLE
            self._open_soon()
        if self._live is None:
            return grpc.ChannelConnectivity.CONNECTING
        return self._live.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until `get_state` differs, also because the connection was replaced."""
        while self.get_state() is last_observed_state:
            waits: list[Awaitable[Any]] = [asyncio.shield(self._changed)]
            if (live := self._live) is not None:
                waits.append(live.channel.wait_for_state_change(last_observed_state))
            with suppress(Exception):  # the channel may be closed meanwhile
                await first_of(*waits)

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
        """Release the channel: a shared one stays open for its other clients."""
        if self._on_close is not None:
            await self._on_close()
            return
        self._shut(grace or 0.0)
        await self._wait_closed()

    async def __aenter__(self) -> AsyncHandler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- for the manager -----------------------------------------------------------------------

    async def _wait_closed(self) -> None:
        """Wait until every replaced generation is closed."""
        await self._until(lambda: not self._retiring, None)

    # -- a call --------------------------------------------------------------------------------

    async def _next(self, timeout: float | None) -> tuple[LiveChannel, float | None]:
        """Wait for a generation; return it, and the rest of the call's timeout."""
        if (live := self._live) is not None:
            return live, timeout
        began = self._loop.time()
        deadline = began + (self._wait_limit if timeout is None else timeout)
        verdicts = self._verdicts
        self._waiting(+1)
        try:
            while (live := self._live) is None:
                now, own = self._loop.time(), timeout is not None
                if (error := self._unsent_reason(verdicts, began, deadline, now, own)) is not None:
                    raise error
                await asyncio.wait([self._changed], timeout=deadline - now)
        finally:
            self._waiting(-1)
        return live, None if timeout is None else max(0.0, deadline - self._loop.time())

    async def _await_change(self, seen: LiveChannel | None, timeout: float) -> bool:
        """Wait for another current generation; return whether there is one."""
        return await self._until(
            lambda: self._closed or (self._live is not None and self._live is not seen), timeout
        )

    async def _until(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds; return whether it does."""
        deadline = Deadline.after(timeout)
        while not holds():
            if deadline.expired:
                return False
            await asyncio.wait([self._changed], timeout=deadline.timeout)
        return True

    async def _sign_later(self, metadata: Any, timeout: float | None) -> Any:
        """Return the call's metadata and those of credentials that must be awaited."""
        assert self._credentials is not None
        try:
            async with asyncio.timeout(timeout):
                return self._joined(metadata, await awaited(self._credentials.metadata()))
        except TimeoutError:
            text = "not sent: the timeout expired before the credentials were available"
            error = AsyncCallUnsent(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            self._unsent(error)
            raise error from None

    def _signed(self, metadata: Any) -> Any:
        if self._credentials is None:
            return metadata
        return self._joined(metadata, self._credentials.metadata())

    def _counts_out(self, live: LiveChannel, credential: int) -> Callable[[Any], None]:
        """Return the done callback for calls of this generation with these credentials.

        It is short because every call runs it.
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
            except Exception:  # from an interceptor; the caller gets it as well
                pass

        return ended

    def _failed(self, call: Any, live: LiveChannel, credential: int) -> None:
        if call.cancelled():
            return
        self._report(_error_of(call), live, credential)

    async def _await_credentials(self, timeout: float | None) -> bool:
        """Wait for a refresh in progress; return whether a refused call may be retried."""
        if (refusals := self._refusals) is None:
            return False
        await self._until(lambda: self._closed or not refusals.refreshing, timeout)
        return refusals.mended and not self._closed

    # -- generations ---------------------------------------------------------------------------

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    def _after(self, delay: float, act: Callable[[], None]) -> Callable[[], object]:
        return self._loop.call_later(delay, act).cancel

    def _closing_handler(self) -> AsyncHandler:
        return AsyncHandler(address=self._address, grace=self._grace, now=self._now)

    def _put(self, live: LiveChannel) -> None:
        make_cuttable(live.channel)
        self._live = live
        self._credential_changed()

    def _credential_changed(self) -> None:
        if (live := self._live) is not None:
            live.ended = self._counts_out(live, self._credential)

    def _call_ended(self, live: LiveChannel) -> None:
        if live.calls:
            return
        try:  # the garbage collector may end a call in any thread
            self._loop.call_soon_threadsafe(self._close_live, live)
        except RuntimeError:  # the loop is closed, and the channel with it
            pass

    def _close_soon(self, live: LiveChannel) -> None:
        self._closing.start(self._close_channel(live))

    async def _close_channel(self, live: LiveChannel) -> None:
        with self._closing_channel(live) as why:
            await cut_async(live.channel, why)


def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the error of a failed call."""
    return grpc.aio.AioRpcError(
        _now(call.code()),
        _now(call.initial_metadata()),
        _now(call.trailing_metadata()),
        _now(call.details()),
        _now(call.debug_error_string()),
    )


def _now(asked: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not suspend; None if it does."""
    try:
        asked.send(None)
    except StopIteration as known:
        return known.value
    asked.close()
    return None
