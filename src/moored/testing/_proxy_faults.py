"""What a fault proxy does to its connections: settings and a rate, without any I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["DIRECTIONS", "Cut", "Direction", "Mode", "ProxyFaults", "ProxyStatistics", "Rate"]

#: `up`: from the client to the server; `down`: from the server to the client.
Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")

Mode = Literal["forward", "stall", "black_hole"]


class ProxyStatistics(NamedTuple):
    """What a fault proxy has counted since it was started."""

    #: Connections that clients made to it.
    accepted: int
    #: Connections that were reset because the server behind refused ours.
    refused: int
    #: Connections over the limit, which were answered or reset.
    limited: int
    #: Connections that are open now.
    open: int
    #: Connections that the proxy reset, by command, by a cut, or to pass on a reset.
    resets: int
    #: Bytes carried from clients to the server.
    bytes_up: int
    #: Bytes carried from the server to clients.
    bytes_down: int
    #: Bytes that vanished in a black hole.
    bytes_swallowed: int


class Cut(NamedTuple):
    """An end after a number of bytes."""

    after: int
    how: Literal["reset", "close"]


@dataclass
class ProxyFaults:
    """Everything that is switched while the proxy runs."""

    mode: Mode = "forward"
    #: Seconds that each byte is delayed, by direction.
    latency: dict[Direction, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    #: Bytes a second of one connection, by direction; 0 is no limit.
    throttle: dict[Direction, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    #: Where connections are cut, by direction.
    cut: dict[Direction, Cut] = field(default_factory=dict)
    #: Grows when the cut is set, so that connections begin to count anew.
    cut_generation: int = 0

    def set_latency(self, seconds: float, direction: Direction | None) -> None:
        """Delay what goes that way, or both ways."""
        if seconds < 0:
            raise ValueError(f"a latency of {seconds} s would deliver before it was sent")
        self.latency.update(dict.fromkeys(_ways(direction), seconds))

    def set_throttle(self, bytes_per_second: float | None, direction: Direction | None) -> None:
        """Slow down what goes that way, or both ways."""
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"{bytes_per_second} bytes/s would never end: use a stall, or None")
        self.throttle.update(dict.fromkeys(_ways(direction), bytes_per_second or 0.0))

    def set_cut(self, cut: Cut | None, direction: Direction | None) -> None:
        """Cut each connection once it has carried so many more bytes that way, or either way."""
        if cut is not None and cut.after < 0:
            raise ValueError(f"a connection cannot be cut after {cut.after} bytes")
        self.cut_generation += 1
        for way in _ways(direction):
            self.cut.pop(way, None)
            if cut is not None:
                self.cut[way] = cut

    def __str__(self) -> str:
        parts = [self.mode.replace("_", "-") + "ing" if self.mode != "black_hole" else "black hole"]
        for way in DIRECTIONS:
            if self.latency[way]:
                parts.append(f"latency {way} {self.latency[way]:g} s")
            if self.throttle[way]:
                parts.append(f"throttle {way} {self.throttle[way]:g} bytes/s")
            if cut := self.cut.get(way):
                parts.append(f"{cut.how} after {cut.after} bytes {way}")
        return ", ".join(parts)


class Rate:
    """So many a second, and so many at once: a bucket of tokens that fills with time."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        if per_second < 0 or burst < 0:
            raise ValueError(f"a rate of {per_second}/s with a burst of {burst} is negative")
        self.per_second = per_second
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take a token; return False if there is none."""
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def __str__(self) -> str:
        return f"{self.per_second:g}/s with a burst of {self.burst:g}"


def _ways(direction: Direction | None) -> tuple[Direction, ...]:
    if direction is None:
        return DIRECTIONS
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is neither 'up' nor 'down'")
    return (direction,)
