"""What a protocol may offer besides sending bytes; what it has not raises `Unsupported`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypedDict, Unpack, overload

from ._content import Media, Poll, Text
from ._errors import Unsupported
from ._outcomes import Acked, Outcome
from ._protocol import Feature, Protocol

__all__ = ["AnyHow", "Features", "How"]


class _How(TypedDict, total=False):
    id: str | None
    timeout: float
    idempotent: bool
    hold: bool


class How(_How, total=False):
    """How something is sent, so that what was not confirmed is raised: see `Session.send`."""

    outcome: Literal[False]
    wait: Literal[True]


class AnyHow(_How, total=False):
    """How something is sent: see `Session.send`."""

    outcome: bool
    wait: bool


class Features(ABC):
    """The part of a session that knows kinds of contents, and leaves the sending to the rest."""

    __slots__ = ()

    protocol: Protocol

    @abstractmethod
    async def _send(self, recipient: str, content: Any, **how: Unpack[AnyHow]) -> Outcome:
        """Send something."""

    @abstractmethod
    async def _ask(self, question: Any, timeout: float = 20.0) -> Any:
        """Ask the server something, or tell it something that it does not answer."""

    @overload
    async def send_text(self, recipient: str, text: str, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_text(self, recipient: str, text: str, **how: Unpack[AnyHow]) -> Outcome: ...

    async def send_text(self, recipient: str, text: str, **how: Unpack[AnyHow]) -> Outcome:
        """Send a text; for `how`, see `send`."""
        self._needs(Feature.TEXT)
        return await self._send(recipient, Text(text), **how)

    @overload
    async def send_media(self, recipient: str, media: Media, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_media(self, recipient: str, media: Media, **how: Unpack[AnyHow]) -> Outcome: ...

    async def send_media(self, recipient: str, media: Media, **how: Unpack[AnyHow]) -> Outcome:
        """Send the descriptor of something that was uploaded; for `how`, see `send`."""
        self._needs(Feature.MEDIA)
        return await self._send(recipient, media, **how)

    async def upload(self, kind: str, data: bytes, *, caption: str = "") -> Media:
        """Put bytes where others can get them."""
        self._needs(Feature.MEDIA)
        media: Media = await self.protocol.upload(self, kind, data, caption)
        return media

    async def download(self, media: Media) -> bytes:
        """Get the bytes of a descriptor."""
        self._needs(Feature.MEDIA)
        return await self.protocol.download(self, media)

    @overload
    async def send_poll(self, recipient: str, poll: Poll, **how: Unpack[How]) -> Acked: ...

    @overload
    async def send_poll(self, recipient: str, poll: Poll, **how: Unpack[AnyHow]) -> Outcome: ...

    async def send_poll(self, recipient: str, poll: Poll, **how: Unpack[AnyHow]) -> Outcome:
        """Ask a question; the outcome's `extra` is the secret with which answers are read."""
        self._needs(Feature.POLLS)
        return await self._send(recipient, poll, **how)

    async def group(self, action: str, **details: Any) -> Any:
        """Do something with a group: "create", "add", "remove", "info", as the protocol has it."""
        self._needs(Feature.GROUPS)
        return await self._ask(self.protocol.question(f"group_{action}", **details))

    async def set_presence(self, state: str, to: str = "") -> None:
        """Say that this account is there, or not, or writes."""
        self._needs(Feature.PRESENCE)
        await self._ask(self.protocol.question("presence", state=state, to=to))

    async def mark_read(self, sender: str, *ids: str) -> None:
        """Tell a sender that these were read."""
        self._needs(Feature.READ_MARKERS)
        await self._ask(self.protocol.question("read", of=sender, ids=list(ids)))

    def _needs(self, feature: Feature) -> None:
        if feature not in self.protocol.features:
            known = ", ".join(sorted(each.value for each in self.protocol.features)) or "none"
            raise Unsupported(
                f"{self.protocol.name} has no {feature.value}; it has: {known}; "
                "send() takes what it can carry"
            )
