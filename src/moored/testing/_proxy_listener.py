"""A listening port that can be closed and reopened, and stays reserved in between."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

__all__ = ["ProxyListener"]


class ProxyListener:
    """Passes each accepted client to a callback, as a non-blocking socket."""

    def __init__(self, host: str, port: int, accept: Callable[[socket.socket], None]) -> None:
        self.host = host
        self.port = port
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._accept_client = accept
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._reserved: socket.socket | None = None

    def open(self) -> None:
        """Listen, on the running event loop."""
        if self._socket is not None:
            return
        self._reserve()
        listener = socket.create_server((self.host, self.port), backlog=1024, family=self._family)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._socket = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Stop listening, so that clients are refused; keep the port reserved."""
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def release(self) -> None:
        """Stop listening and release the port."""
        self.close()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _reserve(self) -> None:
        # A bound socket that does not listen: clients are refused, and the kernel gives the port to
        # no other socket, not even to a client, which it could then connect to itself.
        if self._reserved is None and sys.platform == "linux":
            reserved = socket.socket(self._family)
            try:
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reserved.bind((self.host, self.port))
            except BaseException:
                reserved.close()
                raise
            self.port = reserved.getsockname()[1]
            self._reserved = reserved

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client closed before accept()
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accept_client(client)
