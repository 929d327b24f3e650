"""One direction of a connection: read bytes, apply the faults, and write them in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from moored.kernel import sleep_until

from ._proxy_faults import Cut, Direction
from ._proxy_state import ProxyState

__all__ = ["Flow"]

_CHUNK = 65536
_MOST_PENDING = 4 * 1024 * 1024
#: A throttled connection moves in steps of this many seconds.
_STEP = 0.05


@dataclass(eq=False, repr=False)
class Flow:
    """One direction: `read` and `write` run as two tasks, with a bounded queue between them."""

    _direction: Direction
    _source: socket.socket
    _target: socket.socket
    _state: ProxyState
    _swallow: Callable[[int], None]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _queue: asyncio.Queue[tuple[float, bytes | OSError]] = field(default_factory=asyncio.Queue)
    _pending: int = 0
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    #: The bytes sent since `_cut` was set.
    _carried: int = 0
    _cut: Cut | None = None
    #: When a throttled connection may send again.
    _free_at: float = 0.0
    #: Whether a black hole dropped bytes of this direction.
    _lost_bytes: bool = False

    def __post_init__(self) -> None:
        self._room.set()

    async def read(self) -> None:
        """Queue the bytes that arrive, and at last the end of the stream or the error."""
        data = b"-"
        while data:
            await self._room.wait()
            try:
                data = await self._loop.sock_recv(self._source, _CHUNK)
            except OSError as error:
                self._queue.put_nowait((self._loop.time(), error))
                return
            self._pending += len(data)
            if self._pending >= _MOST_PENDING:
                self._room.clear()
            self._queue.put_nowait((self._loop.time(), data))

    async def write(self) -> None:
        """Forward the queue, each item after its latency and while the proxy is not stalled."""
        while True:
            arrived, data = await self._queue.get()
            await sleep_until(arrived + self._state.latency[self._direction])
            if not data or isinstance(data, OSError):
                await self._end(data)
                return
            await self._pass_on(data)
            self._pending -= len(data)
            self._room.set()

    async def _end(self, last: bytes | OSError) -> None:
        await self._state.forwarding()
        if self._lost_bytes or self._state.mode == "black_hole":
            self._swallow(0)
        elif isinstance(last, OSError):
            raise last
        else:
            self._target.shutdown(socket.SHUT_WR)

    async def _pass_on(self, data: bytes) -> None:
        while data:
            await self._state.forwarding()
            if self._lost_bytes or self._state.mode == "black_hole":
                # After lost bytes nothing more is forwarded, or the receiver would see a gap.
                self._lost_bytes = True
                self._swallow(len(data))
                return
            rate = self._state.throttle[self._direction]
            piece = data[: max(1, int(rate * _STEP))] if rate else data
            await self._send(piece)
            data = data[len(piece) :]
            if rate:
                # Accumulated, so that waits shorter than a timer's resolution count too.
                self._free_at = max(self._free_at, self._loop.time()) + len(piece) / rate
                await sleep_until(self._free_at)

    async def _send(self, data: bytes) -> None:
        cut = self._state.cut[self._direction]
        if cut is not self._cut:
            self._cut, self._carried = cut, 0
        allowed = len(data) if cut is None else max(0, cut.after - self._carried)
        part = data[:allowed]
        await self._loop.sock_sendall(self._target, part)
        self._carried += len(part)
        self._state.add(f"bytes_{self._direction}", len(part))
        if cut is not None and self._carried >= cut.after:
            raise ConnectionResetError
