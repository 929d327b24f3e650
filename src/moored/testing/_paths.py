"""The faults of the simulated network, and which path between two hosts each of them touches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Direction", "Kind", "NetworkFault", "Path", "Range"]

#: Seconds, from and to.
Range = tuple[float, float]
#: Which way a fault works, seen from the host that it names.
Direction = Literal["both", "in", "out"]
Kind = Literal["refuse", "blackhole", "pause", "slow"]


@dataclass(frozen=True)
class NetworkFault:
    """Something that is wrong with a host's network, or with what lies between two hosts."""

    kind: Kind
    host: str
    peer: str | None = None
    direction: Direction = "both"
    latency: Range | None = None

    def touches(self, source: str, target: str) -> bool:
        """Whether a packet on this way meets the fault; a host can always reach itself."""
        out = self.direction != "in" and source == self.host and self._meets(source, target)
        back = self.direction != "out" and target == self.host and self._meets(target, source)
        return out or back

    def is_about(self, host: str, peer: str | None) -> bool:
        """Whether this is a fault of the host, or of what lies between the two."""
        ends = {self.host, self.peer}
        return host in ends if peer is None else ends == {host, peer}

    def _meets(self, host: str, other: str) -> bool:
        return host != other if self.peer is None else other == self.peer


class Path:
    """The way from one host to another, with the faults that lie on it now."""

    __slots__ = ("blackhole", "latency", "paused", "refuses", "source", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.refuses = self.blackhole = self.paused = False
        self.latency: Range | None = None

    def apply(self, faults: Iterable[NetworkFault]) -> None:
        """Take over the faults that hold from now on."""
        mine = [fault for fault in faults if fault.touches(self.source, self.target)]
        kinds = {fault.kind for fault in mine}
        self.refuses = "refuse" in kinds
        self.blackhole = "blackhole" in kinds
        self.paused = "pause" in kinds
        slow = [fault.latency for fault in mine if fault.latency is not None]
        self.latency = slow[-1] if slow else None

    @property
    def open(self) -> bool:
        """Whether a packet gets through now."""
        return not (self.blackhole or self.paused)
