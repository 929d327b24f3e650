"""One direction of one connection: bytes come in, wait as they must, and go out in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from moored.kernel import sleep_until
from moored.testing._proxy_desk import Desk
from moored.testing._proxy_faults import Cut, Direction

__all__ = ["Flow", "WasCut"]

_CHUNK = 65536
_MOST_PENDING = 4 * 1024 * 1024
#: A throttled connection moves in steps of this many seconds.
_STEP = 0.05


class WasCut(Exception):
    """The connection has carried what it was allowed to."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(f"cut after {cut.after} bytes")
        #: Whether it ends by a reset.
        self.resets = cut.how == "reset"


class Flow:
    """One direction: `read` and `write` run as two tasks, with a bounded queue between them."""

    def __init__(
        self,
        direction: Direction,
        source: socket.socket,
        target: socket.socket,
        *,
        desk: Desk,
        swallow: Callable[[int], None],
    ) -> None:
        self._direction = direction
        self._source = source
        self._target = target
        self._desk = desk
        self._faults = desk.faults
        self._swallow = swallow
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue()
        self._pending = 0
        self._room = asyncio.Event()
        self._room.set()
        self._carried = 0
        #: When a throttled connection may send again.
        self._free_at = 0.0
        #: Whether something was swallowed.
        self._holed = False
        self._cut_generation = desk.faults.cut_generation

    async def read(self) -> None:
        """Take in what comes, until its end; the end itself waits its turn like all the rest."""
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
        """Pass on what came, when its time has come and forwarding is not stalled."""
        while True:
            arrived, data = await self._queue.get()
            await sleep_until(arrived + self._faults.latency[self._direction])
            if not data or isinstance(data, OSError):
                await self._end(data)
                return
            await self._pass_on(data)
            self._pending -= len(data)
            self._room.set()

    async def _end(self, last: bytes | OSError) -> None:
        await self._desk.forwarding()
        if self._holed or self._faults.mode == "black_hole":
            self._swallow(0)
        elif isinstance(last, OSError):
            raise last
        else:
            self._target.shutdown(socket.SHUT_WR)

    async def _pass_on(self, data: bytes) -> None:
        while data:
            await self._desk.forwarding()
            if self._holed or self._faults.mode == "black_hole":
                # What comes after a hole never arrives, or the stream would have lost its middle.
                self._holed = True
                self._swallow(len(data))
                return
            rate = self._faults.throttle[self._direction]
            piece = data[: max(1, int(rate * _STEP))] if rate else data
            await self._send(piece)
            data = data[len(piece) :]
            if rate:
                # Added up, so that waits shorter than a timer's resolution are not lost.
                self._free_at = max(self._free_at, self._loop.time()) + len(piece) / rate
                await sleep_until(self._free_at)

    async def _send(self, data: bytes) -> None:
        if self._cut_generation != self._faults.cut_generation:
            self._cut_generation = self._faults.cut_generation
            self._carried = 0
        cut = self._faults.cut.get(self._direction)
        allowed = len(data) if cut is None else max(0, cut.after - self._carried)
        part = data[:allowed]
        await self._loop.sock_sendall(self._target, part)
        self._carried += len(part)
        self._desk.add(f"bytes_{self._direction}", len(part))
        if cut is not None and self._carried >= cut.after:
            raise WasCut(cut)
