"""Servers on the simulated network."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._hosts import Process
    from ._loop import SimLoop
    from ._transport import SimTransport

__all__ = ["SimServer", "SimSocket"]

# Before 3.12.1 asyncio's wait_closed() returned at once after close(); so does this one.
_WAITS_FOR_CONNECTIONS = sys.version_info >= (3, 12, 1)


class SimSocket:
    """The socket in `get_extra_info("socket")` and `Server.sockets`: addresses only."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, name: tuple[str, int], peer: tuple[str, int] | None = None) -> None:
        self._name = name
        self._peer = peer

    def getsockname(self) -> tuple[str, int]:
        """Return the address of this end."""
        return self._name

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the other end."""
        if self._peer is None:
            raise OSError(107, "Transport endpoint is not connected")
        return self._peer

    def setsockopt(self, *args: Any) -> None:
        """Ignore the option."""

    def getsockopt(self, *args: Any) -> int:
        """Return 0."""
        return 0

    def fileno(self) -> int:
        """Return -1: there is no file descriptor."""
        return -1

    def __repr__(self) -> str:
        return f"<SimSocket {self._name} -> {self._peer}>"


class SimServer(asyncio.AbstractServer):
    """A listening server of a simulated process."""

    def __init__(
        self,
        loop: SimLoop,
        process: Process,
        context: Context,
        factory: Callable[[], asyncio.BaseProtocol],
        addresses: Sequence[tuple[str, int]],
    ) -> None:
        self._loop = loop
        self.process = process
        self._context = context
        self._factory = factory
        self.addresses = tuple(addresses)
        self._open = True
        self._serving = False
        self._clients: dict[SimTransport, None] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._forever: asyncio.Future[None] | None = None
        process.servers[self] = None

    @property
    def sockets(self) -> tuple[SimSocket, ...]:
        """The listening sockets, none after `close()`."""
        return tuple(map(SimSocket, self.addresses)) if self._open else ()

    def accept(self, transport: SimTransport) -> None:
        """Accept a connection; its protocol is created when the process next runs."""
        transport.server = self
        self._clients[transport] = None
        self._loop.call_soon(self._start, transport, context=transport.context)

    def _start(self, transport: SimTransport) -> None:
        transport.start(self._factory())

    def connection_context(self) -> Context:
        """Return a context for one connection."""
        return self._context.copy()

    def detach(self, transport: SimTransport) -> None:
        """Remove a connection that has ended."""
        self._clients.pop(transport, None)
        self._wake_waiters()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self._loop

    def is_serving(self) -> bool:
        """Whether new connections are accepted."""
        return self._serving

    def serve(self) -> None:
        """Start to accept connections."""
        if not self._open:
            raise RuntimeError(f"server {self!r} is closed")
        self._serving = True

    async def start_serving(self) -> None:
        """Start to accept connections."""
        self.serve()
        await asyncio.sleep(0)

    async def serve_forever(self) -> None:
        """Serve until cancelled or closed."""
        if self._forever is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        self.serve()
        self._forever = self._loop.create_future()
        try:
            await self._forever
        except asyncio.CancelledError:
            self.close()
            await self.wait_closed()
            raise
        finally:
            self._forever = None

    def close(self) -> None:
        """Stop accepting; open connections are kept."""
        if not self._open:
            return
        self.stop_listening()
        if self._forever is not None:
            self._forever.cancel()
        self._wake_waiters()

    def close_clients(self) -> None:
        """Close every connection."""
        for transport in list(self._clients):
            transport.close()

    def abort_clients(self) -> None:
        """Abort every connection."""
        for transport in list(self._clients):
            transport.abort()

    def _wake_waiters(self) -> None:
        if not self._open and not self._clients:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait_closed(self) -> None:
        """Wait until the server is closed and, as asyncio does since 3.12.1, has no connections."""
        if not self._open and not (_WAITS_FOR_CONNECTIONS and self._clients):
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def stop_listening(self) -> None:
        """Refuse new connections, without waking any waiter."""
        self._open = self._serving = False
        self.process.servers.pop(self, None)
        self._loop.network.unlisten(self)

    def __repr__(self) -> str:
        where = ", ".join(f"{host}:{port}" for host, port in self.addresses)
        return f"<SimServer {where}, {len(self._clients)} connections>"
