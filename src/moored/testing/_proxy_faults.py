"""The faults and the rate limit of a proxy, as plain state without I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["DIRECTIONS", "Cut", "Direction", "Mode", "ProxyFaults", "ProxyStatistics", "Rate"]

#: `up`: from the client to the server; `down`: from the server to the client.
Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")

Mode = Literal["forward", "stall", "black_hole"]


class ProxyStatistics(NamedTuple):
    """The counters of a fault proxy since its start."""

    #: Connections accepted from clients.
    accepted: int
    #: Client connections reset because the connection to the server failed.
    refused: int
    #: Connections over the rate limit, which were sent the answer or reset.
    limited: int
    #: Connections that are open now.
    open: int
    #: Connections reset by the proxy: by `reset()`, by a cut, or to forward a reset.
    resets: int
    #: Bytes forwarded from clients to the server.
    bytes_up: int
    #: Bytes forwarded from the server to clients.
    bytes_down: int
    #: Bytes dropped by a black hole.
    bytes_swallowed: int


class Cut(NamedTuple):
    """End a connection after a number of bytes."""

    after: int
    how: Literal["reset", "close"]


@dataclass
class ProxyFaults:
    """The faults of all connections of a proxy."""

    mode: Mode = "forward"
    #: Seconds by which each byte is delayed, by direction.
    latency: dict[Direction, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    #: Bytes per second of one connection, by direction; 0 is no limit.
    throttle: dict[Direction, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    #: The cut of each connection, by direction.
    cut: dict[Direction, Cut] = field(default_factory=dict)
    #: Grows when a cut is set, so that connections restart their byte count.
    cut_generation: int = 0

    def set_latency(self, seconds: float, direction: Direction | None) -> None:
        """Delay the bytes of one direction, or of both."""
        if seconds < 0:
            raise ValueError(f"latency must be 0 or more seconds, not {seconds}")
        self.latency.update(dict.fromkeys(_directions(direction), seconds))

    def set_throttle(self, bytes_per_second: float | None, direction: Direction | None) -> None:
        """Limit the rate of one direction, or of both."""
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(
                f"throttle must be more than 0 bytes/s, not {bytes_per_second}: "
                "use stall() to stop, None to remove the limit"
            )
        self.throttle.update(dict.fromkeys(_directions(direction), bytes_per_second or 0.0))

    def set_cut(self, cut: Cut | None, direction: Direction | None) -> None:
        """Cut each connection after so many more bytes in one direction, or in either."""
        if cut is not None and cut.after < 0:
            raise ValueError(f"the bytes before a cut must be 0 or more, not {cut.after}")
        self.cut_generation += 1
        for each in _directions(direction):
            self.cut.pop(each, None)
            if cut is not None:
                self.cut[each] = cut

    def __str__(self) -> str:
        parts = [self.mode.replace("_", "-") + "ing" if self.mode != "black_hole" else "black hole"]
        for direction in DIRECTIONS:
            if self.latency[direction]:
                parts.append(f"latency {direction} {self.latency[direction]:g} s")
            if self.throttle[direction]:
                parts.append(f"throttle {direction} {self.throttle[direction]:g} bytes/s")
            if cut := self.cut.get(direction):
                parts.append(f"{cut.how} after {cut.after} bytes {direction}")
        return ", ".join(parts)


class Rate:
    """A token bucket: a rate per second, and a burst."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        if per_second < 0 or burst < 0:
            raise ValueError(f"rate and burst must be 0 or more, not {per_second}/s and {burst}")
        self.per_second = per_second
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take a token; return False if the bucket is empty."""
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def __str__(self) -> str:
        return f"{self.per_second:g}/s with a burst of {self.burst:g}"


def _directions(direction: Direction | None) -> tuple[Direction, ...]:
    if direction is None:
        return DIRECTIONS
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be 'up' or 'down', not {direction!r}")
    return (direction,)
