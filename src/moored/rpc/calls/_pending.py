"""Pending calls for asyncio: `grpc.aio` calls that wait for a connection.

A task makes the real call when it can; the methods of the pending call wait for that. As with
gRPC's own calls, a task that is cancelled while it awaits the response, reads or writes cancels the
call; one that is cancelled while it awaits the code or the metadata does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from time import monotonic
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

__all__ = [
    "CANCELLED",
    "PendingStreamStream",
    "PendingStreamUnary",
    "PendingUnaryStream",
    "PendingUnaryUnary",
]

CANCELLED = "Locally cancelled by application!"


class _Pending:
    """A call that a task will make."""

    def __init__(self, making: Coroutine[Any, Any, Any], timeout: float | None) -> None:
        self._deadline = None if timeout is None else monotonic() + timeout
        self._callbacks: list[Callable[[Any], None]] = []
        self._given_up = False
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(making)
        # The first callback of the task: those that follow find the real call in place.
        self._task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[Any]) -> None:
        call = self._call
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            if call is None:
                callback(self)
            else:
                self._pass_on(call, callback)

    def _pass_on(self, call: Any, callback: Callable[[Any], None]) -> None:
        call.add_done_callback(lambda _: callback(self))

    @property
    def _call(self) -> Any | None:
        """The real call; None before it is made, and if that failed."""
        task = self._task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _asked(self, name: str, own: Callable[[], Any]) -> Any:
        """Await a method of the real call once it is made; `own` stands in if that failed."""
        if not self._task.done():
            await asyncio.wait([self._task])
        call = self._call
        return own() if call is None else await getattr(call, name)()

    def _own_code(self) -> grpc.StatusCode:
        if self._task.cancelled():
            return grpc.StatusCode.CANCELLED
        error = self._task.exception()
        return error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNKNOWN

    def _own_details(self) -> Any:
        if self._task.cancelled():
            return CANCELLED
        error = self._task.exception()
        return error.details() if isinstance(error, grpc.RpcError) else str(error)

    # -- the interface of grpc.aio.Call --------------------------------------------------------

    def cancel(self) -> bool:
        """See `grpc.aio.Call`."""
        call = self._call
        if call is not None:
            return bool(call.cancel())
        if self._task.done() or self._given_up:
            return False
        self._given_up = True
        return self._task.cancel()

    def cancelled(self) -> bool:
        """See `grpc.aio.Call`."""
        call = self._call
        if call is not None:
            return bool(call.cancelled())
        return self._given_up or self._task.cancelled()

    def done(self) -> bool:
        """See `grpc.aio.Call`."""
        call = self._call
        return self._given_up or self._task.done() if call is None else bool(call.done())

    def time_remaining(self) -> float | None:
        """See `grpc.aio.Call`."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See `grpc.aio.Call`."""
        call = self._call
        if call is not None:
            self._pass_on(call, callback)
        elif self._task.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._asked("initial_metadata", grpc.aio.Metadata)

    async def trailing_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._asked("trailing_metadata", grpc.aio.Metadata)

    async def code(self) -> grpc.StatusCode:
        """See `grpc.aio.Call`."""
        return await self._asked("code", self._own_code)

    async def details(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._asked("details", self._own_details)

    async def debug_error_string(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._asked("debug_error_string", self._own_details)

    async def wait_for_connection(self) -> None:
        """See `grpc.aio.Call`."""
        await (await self._task).wait_for_connection()

    def __repr__(self) -> str:
        call = self._call
        state = "cancelled" if self.cancelled() else "failed" if self.done() else "waiting"
        return f"<{type(self).__name__}: {state if call is None else call!r}>"


class _Answered(_Pending):
    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._task.__await__()
        return (yield from call.__await__())


class _Read(_Pending):
    _messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._messages is None:
            self._messages = self._iterate()
        return self._messages

    async def _iterate(self) -> AsyncIterator[Any]:
        async for message in await self._task:
            yield message

    async def read(self) -> Any:
        """See `grpc.aio.UnaryStreamCall`."""
        return await (await self._task).read()


class _Written(_Pending):
    async def write(self, request: Any) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        await (await self._task).write(request)

    async def done_writing(self) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        await (await self._task).done_writing()


class PendingUnaryUnary(_Answered, grpc.aio.UnaryUnaryCall):  # type: ignore[misc]
    """One request, one response."""


class PendingUnaryStream(_Read, grpc.aio.UnaryStreamCall):  # type: ignore[misc]
    """One request, a stream of responses."""


class PendingStreamUnary(_Written, _Answered, grpc.aio.StreamUnaryCall):  # type: ignore[misc]
    """A stream of requests, one response."""


class PendingStreamStream(_Written, _Read, grpc.aio.StreamStreamCall):  # type: ignore[misc]
    """A stream of requests, a stream of responses."""
