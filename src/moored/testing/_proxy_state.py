"""The state that all connections of a proxy share: faults, server address and counters."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from ._proxy_answer import Answer, Caller
from ._proxy_faults import DIRECTIONS, Cut, Direction, Mode, ProxyStatistics, Rate

__all__ = ["ProxyState"]


class ProxyState:
    """The shared state of one proxy; used only on its event loop."""

    def __init__(self, host: str, port: int | None) -> None:
        self.server = (host, port)
        self.mode: Mode = "forward"
        #: Seconds by which each byte is delayed, by direction.
        self.latency: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        #: Bytes per second of one connection, by direction; 0 is no limit.
        self.throttle: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        #: The cut of each connection, by direction.
        self.cut: dict[Direction, Cut | None] = dict.fromkeys(DIRECTIONS)
        self.rate: Rate | None = None
        self.answer: Answer | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._counts = dict.fromkeys(ProxyStatistics._fields, 0)
        self._watchers: list[tuple[Callable[[ProxyStatistics], bool], asyncio.Future[None]]] = []

    def switch(self, mode: Mode) -> None:
        """Set whether bytes are forwarded, held back or dropped."""
        self.mode = mode
        if mode == "stall":
            self._gate.clear()
        else:
            self._gate.set()

    async def forwarding(self) -> None:
        """Wait until the proxy is not stalled."""
        while not self._gate.is_set():
            await self._gate.wait()

    async def dial(self) -> socket.socket:
        """Open a connection to the server."""
        host, port = self.server
        loop = asyncio.get_running_loop()
        if port is None:
            return await _connect(loop, socket.AF_UNIX, host)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return await _connect(loop, family, address)

    def over_limit(self, now: float) -> Answer | None:
        """Return the answer for a new connection over the rate limit, or None within the limit."""
        if self.rate is None or self.mode == "black_hole" or self.rate.take(now):
            return None
        self.add("limited")
        return self.answer or _reset

    def add(self, name: str, size: int = 1) -> None:
        """Add to a counter, and wake the waiters whose condition holds."""
        self._counts[name] += size
        if self._watchers:
            counts = self.statistics()
            for predicate, future in self._watchers:
                if not future.done() and predicate(counts):
                    future.set_result(None)

    def statistics(self) -> ProxyStatistics:
        """Return the counters."""
        return ProxyStatistics(**self._counts)

    async def wait_until(self, predicate: Callable[[ProxyStatistics], bool]) -> None:
        """Wait until the counters meet a condition."""
        if predicate(self.statistics()):
            return
        entry = (predicate, asyncio.get_running_loop().create_future())
        self._watchers.append(entry)
        try:
            await entry[1]
        finally:
            self._watchers.remove(entry)

    def __str__(self) -> str:
        parts = ["black hole" if self.mode == "black_hole" else f"{self.mode}ing"]
        for direction in DIRECTIONS:
            if self.latency[direction]:
                parts.append(f"latency {direction} {self.latency[direction]:g} s")
            if self.throttle[direction]:
                parts.append(f"throttle {direction} {self.throttle[direction]:g} bytes/s")
            if cut := self.cut[direction]:
                parts.append(f"reset after {cut.after} bytes {direction}")
        return ", ".join(parts)


async def _reset(caller: Caller) -> None:
    raise ConnectionResetError("the connection is over the rate limit")


async def _connect(loop: asyncio.AbstractEventLoop, family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
