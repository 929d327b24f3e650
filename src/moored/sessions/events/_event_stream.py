"""The events of a session as an asynchronous iterator, and as a block that acknowledges at its end.

An iterator is not told why its loop was left: by `return`, or by an exception. A context manager
is, so only that one may acknowledge the last message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .._content import Incoming

if TYPE_CHECKING:
    from ._sink import Sink

__all__ = ["EventStream", "Leaving"]


class Leaving:
    """How a consumer leaves. (The stream itself would make a circle, and outlive its loop.)"""

    __slots__ = ("handled",)

    def __init__(self) -> None:
        #: Whether the consumer is done with the message that it took last.
        self.handled = False


class EventStream(AsyncIterator[Incoming]):
    """Every event of a session, from the first use on: `async for event in session.events()`.

    A message is acknowledged when the loop asks for the next event. In a block, ``async with
    session.events() as events:``, the last one is acknowledged as well when the block is left
    without an exception. Otherwise the message that the loop had is handed out again.
    """

    __slots__ = ("_generator", "_leaving")

    def __init__(self, sink: Sink) -> None:
        self._leaving = Leaving()
        self._generator: AsyncGenerator[Incoming] = sink.iterate(self._leaving)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Incoming:
        return await anext(self._generator)

    async def aclose(self) -> None:
        """Leave: the message that was taken last is handed out again."""
        await self._generator.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.handled = kind is None
        await self._generator.aclose()
