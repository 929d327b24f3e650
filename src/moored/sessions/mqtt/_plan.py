"""What one link is to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Plan", "lacks"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a link is to do: the protocol's settings, filled in for one profile."""

    hello: bytes = field(repr=False)
    #: Whether the hello asks for a clean start.
    clean: bool
    #: The topic of a send is the recipient, put between these.
    topic: tuple[str, ...]
    #: What to subscribe to, each with the words for it in logs.
    filters: tuple[tuple[str, str], ...]
    resumes: bool
    keepalive: float | None
    window: int
    receive_maximum: int
    max_packet_size: int
    goodbye: bytes


def lacks(text: str, options: Mapping[str, Any]) -> int:
    """Why the server cannot have this subscription; 0 if it can."""
    wild = "#" in text or "+" in text
    if wild and not options.get("wildcard_subscription_available", 1):
        return 0xA2
    if text.startswith("$share/") and not options.get("shared_subscription_available", 1):
        return 0x9E
    return 0
