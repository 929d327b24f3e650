"""The interfaces between a link and what carries its bytes.

A transport never blocks: `write` buffers, and `pending` shows how much is buffered.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Endpoint", "PartReceiver", "Receiver", "Transport"]


class Receiver(Protocol):
    """The callbacks of a transport; called on the event loop, and never after `lost`."""

    def received(self, data: bytes) -> None:
        """Handle received bytes."""

    def lost(self, error: BaseException | None) -> None:
        """Handle the end of the connection, once: closed by the peer (None), or by an error."""


@runtime_checkable
class PartReceiver(Receiver, Protocol):
    """A receiver that also wants to know when a part of a message has arrived."""

    def heard(self) -> None:
        """Note that the peer is alive: a part of a message has arrived."""


class Transport(Protocol):
    """An open connection."""

    @property
    def keeps_bounds(self) -> bool:
        """Whether each write becomes a message of its own, so that writes must not be joined."""

    def write(self, data: bytes) -> None:
        """Send bytes as soon as possible; does nothing after the end of the connection."""

    @property
    def pending(self) -> int:
        """The number of bytes in the send buffer."""

    def close(self) -> None:
        """Flush the send buffer, then close; `lost(None)` follows."""

    def abort(self) -> None:
        """Close immediately and drop the send buffer; `lost` follows."""


class Endpoint(Protocol):
    """The address of a server, and how to connect to it."""

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` (or a subclass) with the reason. May be cancelled."""

    def __str__(self) -> str:
        """The address for logs and errors, without secrets."""
