"""A port that can stop listening and start again, and stays reserved meanwhile."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

__all__ = ["ProxyListener"]


class ProxyListener:
    """A listening port; its clients are handed over as non-blocking sockets."""

    def __init__(self, host: str, port: int, welcome: Callable[[socket.socket], None]) -> None:
        self.host = host
        self.port = port
        self._welcome = welcome
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._holder: socket.socket | None = None

    def open(self) -> None:
        """Listen, from the loop that runs here."""
        if self._socket is not None:
            return
        self._hold()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), backlog=1024, family=family)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._socket = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Stop listening, so that clients are refused; the port is kept."""
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def release(self) -> None:
        """Stop listening and let the port go."""
        self.close()
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def _hold(self) -> None:
        # A bound socket that does not listen: clients are refused, and nobody else gets the port
        # while we do not listen, not even a client, whom the kernel could connect to itself.
        if self._holder is None and sys.platform == "linux":
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            holder = socket.socket(family)
            try:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((self.host, self.port))
            except BaseException:
                holder.close()
                raise
            self.port = holder.getsockname()[1]
            self._holder = holder

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # one who went before his turn
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._welcome(client)
