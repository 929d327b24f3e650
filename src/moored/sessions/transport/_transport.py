"""What carries bytes: one seam of four methods, and where it leads.

A transport never blocks: `write` buffers, and whoever writes much looks at `pending`.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Endpoint", "Receiver", "Transport"]


class Receiver(Protocol):
    """Who is told what a transport receives; always on the loop, never after `lost`."""

    def received(self, data: bytes) -> None:
        """Bytes have come in."""

    def lost(self, error: BaseException | None) -> None:
        """It is over, once: closed by the other side (None), or broken."""


class Transport(Protocol):
    """A link that is open."""

    @property
    def keeps_bounds(self) -> bool:
        """Whether each write is a message of its own, so that two must not be joined."""

    def write(self, data: bytes) -> None:
        """Send bytes, as soon as that is possible; after the end, nothing happens."""

    @property
    def pending(self) -> int:
        """How many bytes wait to be sent."""

    def close(self) -> None:
        """Send what is pending, then end; `lost(None)` follows."""

    def abort(self) -> None:
        """End now, whatever is pending; `lost` follows."""


class Endpoint(Protocol):
    """Where a transport leads, and how one is made."""

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` (or a subclass) that says what failed. May be cancelled."""

    def __str__(self) -> str:
        """For people, without secrets."""
