"""The kinds of faults, the counters and the rate limit of a proxy, without I/O."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["DIRECTIONS", "Cut", "Direction", "Mode", "ProxyStatistics", "Rate"]

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
    """Reset a connection after a number of bytes, counted anew for each object."""

    after: int


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
