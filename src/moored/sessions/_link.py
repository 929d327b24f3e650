"""One socket, from its dial to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ._transport import Transport

__all__ = ["Link", "Listener"]


class Listener(Protocol):
    """Who is told what a link says."""

    def received(self, link: Link, data: bytes) -> None:
        """Bytes have come in over a link."""

    def lost(self, link: Link, error: BaseException | None) -> None:
        """A link is over."""

    def heard(self, link: Link) -> None:
        """A part of something has come in over a link."""


class Link:
    """One socket, from its dial to its end: what it says is told to its listener."""

    __slots__ = ("_early", "_listener", "generation", "over", "transport")

    def __init__(self, listener: Listener, generation: int) -> None:
        self._listener = listener
        # What it said before its dial has returned.
        self._early: list[Callable[[], None]] | None = []
        self.generation = generation
        self.transport: Transport | None = None
        #: Whether the socket is gone.
        self.over = False

    def received(self, data: bytes) -> None:
        """Bytes have come in."""
        if self._early is None:
            self._listener.received(self, data)
        else:
            self._early.append(lambda: self._listener.received(self, data))

    def lost(self, error: BaseException | None) -> None:
        """It is over."""
        self.over = True
        if self._early is None:
            self._listener.lost(self, error)
        else:
            self._early.append(lambda: self._listener.lost(self, error))

    def heard(self) -> None:
        """A part of something has come in, and the rest is still on its way."""
        if self._early is None:
            self._listener.heard(self)

    def listen(self) -> None:
        """From now on it is heard."""
        early, self._early = self._early, None
        for each in early or ():
            each()
