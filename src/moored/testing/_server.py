"""Servers on the simulated network."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._hosts import Process
    from ._loop import SimLoop
    from ._transport import SimTransport

__all__ = ["SimServer", "SimSocket"]


@dataclass(eq=False)
class SimSocket:
    """The socket in `get_extra_info("socket")` and `Server.sockets`: addresses only."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    _name: tuple[str, int]
    _peer: tuple[str, int] | None = None

    def getsockname(self) -> tuple[str, int]:
        """Return the address of this end."""
        return self._name

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the other end."""
        if self._peer is None:
            raise OSError(107, "Transport endpoint is not connected")
        return self._peer

    def listen(self, backlog: int) -> None:
        """Do nothing: the simulated network has the server."""

    def setsockopt(self, *args: Any) -> None:
        """Ignore the option."""

    def getsockopt(self, *args: Any) -> int:
        """Return 0."""
        return 0

    def fileno(self) -> int:
        """Return -1: there is no file descriptor."""
        return -1


class SimServer(asyncio.Server):
    """A listening server of a simulated process: asyncio's own class, with simulated sockets."""

    # Undocumented attributes of asyncio's class that this class uses; a test guards them.
    _attach: Callable[..., None]
    _detach: Callable[..., None]
    _protocol_factory: Callable[[], asyncio.BaseProtocol]
    _serving: bool
    _sockets: Sequence[Any] | None

    def __init__(
        self,
        loop: SimLoop,
        process: Process,
        factory: Callable[[], asyncio.BaseProtocol],
        addresses: Sequence[tuple[str, int]],
    ) -> None:
        sockets: Any = [SimSocket(address) for address in addresses]
        super().__init__(loop, sockets, factory, None, 0, None)
        self.loop = loop
        self.process = process
        self._context = process.context()
        process.servers[self] = None

    def accept(self, transport: SimTransport) -> None:
        """Accept a connection; its protocol is created when the process next runs."""
        transport.server = self
        self._attach(*_client(transport))
        self.loop.call_soon(self._start, transport, context=transport.context)

    def _start(self, transport: SimTransport) -> None:
        transport.start(self._protocol_factory())

    def connection_context(self) -> Context:
        """Return a context for one connection."""
        return self._context.copy()

    def detach(self, transport: SimTransport) -> None:
        """Remove a connection that has ended."""
        self._detach(*_client(transport))

    def close(self) -> None:
        """Stop accepting; open connections are kept."""
        self.process.servers.pop(self, None)
        super().close()

    def killed(self) -> None:
        """Refuse new connections, because the process was killed; wake no waiter."""
        for each in self._sockets or ():
            self.loop._stop_serving(each)
        self._sockets, self._serving = None, False


def _client(transport: SimTransport) -> tuple[SimTransport, ...]:
    """Return the arguments of asyncio's `_attach` and `_detach`: since 3.13, the transport."""
    return (transport,) if sys.version_info >= (3, 13) else ()
