"""The faults of the simulated network, and the paths between hosts that they affect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Direction", "Kind", "NetworkFault", "Path", "Range"]

#: Minimum and maximum, in seconds.
Range = tuple[float, float]
#: The packets that a fault affects, seen from its host.
Direction = Literal["both", "in", "out"]
Kind = Literal["refuse", "blackhole", "pause", "slow"]


@dataclass(frozen=True)
class NetworkFault:
    """A fault between a host and all others, or between two hosts."""

    kind: Kind
    host: str
    peer: str | None = None
    direction: Direction = "both"
    latency: Range | None = None

    def touches(self, source: str, target: str) -> bool:
        """Whether the fault affects packets from `source` to `target`; never a host's loopback."""
        out = self.direction != "in" and source == self.host and self._meets(source, target)
        back = self.direction != "out" and target == self.host and self._meets(target, source)
        return out or back

    def is_about(self, host: str, peer: str | None) -> bool:
        """Whether this is a fault of the host, or (with `peer`) between the two hosts."""
        ends = {self.host, self.peer}
        return host in ends if peer is None else ends == {host, peer}

    def _meets(self, host: str, other: str) -> bool:
        return host != other if self.peer is None else other == self.peer


class Path:
    """The packets from one host to another, with the faults that affect them now."""

    __slots__ = ("blackhole", "latency", "paused", "refuses", "source", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.refuses = self.blackhole = self.paused = False
        self.latency: Range | None = None

    def apply(self, faults: Iterable[NetworkFault]) -> None:
        """Replace the faults of this path."""
        mine = [fault for fault in faults if fault.touches(self.source, self.target)]
        kinds = {fault.kind for fault in mine}
        self.refuses = "refuse" in kinds
        self.blackhole = "blackhole" in kinds
        self.paused = "pause" in kinds
        slow = [fault.latency for fault in mine if fault.latency is not None]
        self.latency = slow[-1] if slow else None

    @property
    def open(self) -> bool:
        """Whether packets are delivered now."""
        return not (self.blackhole or self.paused)
