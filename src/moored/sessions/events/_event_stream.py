"""The events of a session as an asynchronous iterator and context manager.

An iterator cannot see whether its loop was left by `return` or by an exception. A context manager
can, so it acknowledges the last message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .._content import Incoming

if TYPE_CHECKING:
    from ._sink import Sink

__all__ = ["EventStream", "StreamState"]


@dataclass(slots=True)
class StreamState:
    """The state of a stream. (Not the stream itself: a reference cycle.)"""

    #: Whether the stream has replaced the consumer before it.
    attached: bool = False
    #: Whether the consumer has left the stream and has handled the last message.
    handled: bool = False


class EventStream(AsyncIterator[Incoming]):
    """The events of a session: `async for event in session.events()`.

    A message is acknowledged when the loop requests the next event. In a block, ``async with
    session.events() as events:``, the last message is acknowledged when the block is left without
    an exception. Otherwise it is delivered again to the next consumer. A cancelled call, such as
    `anext()` with a timeout, loses no event.
    """

    __slots__ = ("_generator", "_sink", "_state")

    def __init__(self, sink: Sink) -> None:
        self._sink, self._state = sink, StreamState()
        self._generator: AsyncGenerator[Incoming] = sink.iterate(self._state)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Incoming:
        try:
            return await anext(self._generator)
        except asyncio.CancelledError:
            self._generator = self._sink.iterate(self._state)  # the cancelled one has ended
            raise

    async def aclose(self) -> None:
        """Detach from the session; the last message is delivered again to the next consumer."""
        await self._generator.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._state.handled = kind is None
        await self._generator.aclose()
