"""The vocabulary of faults, each of which can be switched while a scenario runs.

refuse      new connections to a host are refused, as when nothing listens
blackhole   packets vanish; connections that carried some meanwhile stay half-open for ever
pause       packets wait; nothing is lost, and everything goes on after `heal`
slow        packets take as long as this says
reset       connections that exist now are reset, on both sides (this one is over at once)
heal        all of that is over
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._paths import Direction, Fault, Path, Range
from ._pipe import RST, Pipe

if TYPE_CHECKING:
    from ._loop import SimLoop

__all__ = ["Faults"]


class Faults(ABC):
    """What can go wrong between hosts.

    A fault names one host, and then touches everything between it and the others; or two hosts,
    and then touches what lies between these two. `direction` narrows a fault to packets that come
    "in" to the first host or go "out" of it.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self._paths: dict[tuple[str, str], Path] = {}
        self._faults: list[Fault] = []
        self._pipes: dict[Pipe, None] = {}

    @abstractmethod
    def known(self, name: str, peer: str | None) -> tuple[str, str | None]:
        """The hosts that a fault means; an error if there are none of these names."""

    def refuse(self, host: str, peer: str | None = None) -> None:
        """Refuse new connections to a host (from one peer, or from all)."""
        self._add(Fault("refuse", *self.known(host, peer), direction="in"))

    def blackhole(
        self, host: str, peer: str | None = None, *, direction: Direction = "both"
    ) -> None:
        """Swallow packets: writes succeed and nothing arrives, as when a cable is pulled.

        A connection that loses bytes this way does not come back after `heal`: it stays half-open
        until one of its sides gives up. An idle one survives.
        """
        self._add(Fault("blackhole", *self.known(host, peer), direction=direction))

    def pause(self, host: str, peer: str | None = None, *, direction: Direction = "both") -> None:
        """Hold packets back until `heal`; nothing is lost."""
        self._add(Fault("pause", *self.known(host, peer), direction=direction))

    def slow(self, host: str, peer: str | None = None, *, latency: Range) -> None:
        """Let packets take between so many and so many seconds."""
        self._add(Fault("slow", *self.known(host, peer), latency=latency))

    def heal(self, host: str | None = None, peer: str | None = None) -> None:
        """End the faults of a host, those between two hosts, or (without a name) all of them."""
        self.loop.mark("network", f"heal {host or 'everything'} {peer or ''}", 6)
        if host is None:
            self._faults.clear()
        else:
            name, other = self.known(host, peer)
            self._faults = [each for each in self._faults if not each.is_about(name, other)]
        self._reroute()

    def reset(self, host: str, peer: str | None = None) -> None:
        """Reset the connections of a host (or those between two), as a firewall that restarts."""
        self.loop.mark("network", f"reset {host} {peer or ''}", 7)
        reset = Fault("refuse", *self.known(host, peer))
        for pipe in list(self._pipes):
            if reset.touches(pipe.path.source, pipe.path.target):
                pipe.signal(RST)

    def path(self, source: str, target: str) -> Path:
        """The way from one host to another."""
        key = (source, target)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = Path(*key)
            path.apply(self._faults)
        return path

    def paused(self) -> Iterator[str]:
        """Hosts whose network is paused, for people who wonder why nothing moves."""
        return (fault.host for fault in self._faults if fault.kind == "pause")

    def _add(self, fault: Fault) -> None:
        between = f" and {fault.peer}" if fault.peer else ""
        self.loop.mark("network", f"{fault.kind} {fault.host}{between} ({fault.direction})", 8)
        self._faults.append(fault)
        self._reroute()

    def _reroute(self) -> None:
        for path in self._paths.values():
            path.apply(self._faults)
        for pipe in self._pipes:
            if pipe.stalled and not pipe.path.paused:
                pipe.resume()
