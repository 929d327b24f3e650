"""The events of a session as an asynchronous iterator and context manager.

An iterator cannot see whether its loop was left by `return` or by an exception. A context manager
can, so it acknowledges the last message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .._content import Incoming

if TYPE_CHECKING:
    from ._sink import Sink

__all__ = ["EventStream", "Leaving"]


@dataclass(slots=True)
class Leaving:
    """How a consumer has left its stream. (Not the stream itself: a reference cycle.)"""

    #: Whether the consumer has handled the last message.
    handled: bool = False


class EventStream(AsyncIterator[Incoming]):
    """The events of a session: `async for event in session.events()`.

    A message is acknowledged when the loop requests the next event. In a block, ``async with
    session.events() as events:``, the last message is acknowledged when the block is left without
    an exception. Otherwise it is delivered again to the next consumer.
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
        """Detach from the session; the last message is delivered again to the next consumer."""
        await self._generator.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving.handled = kind is None
        await self._generator.aclose()
