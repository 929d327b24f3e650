"""Cutting the connection of a client that does not read, for which ASGI has no message."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from moored.kernel import cut_socket

__all__ = ["ClientConnection"]

#: Seconds for which a list of the sockets of this process is used: many clients may be cut at once.
FRESH = 0.5
#: A client's address and port, and the port of the server.
Ends = tuple[str, int, int]


class ClientConnection:
    """The connection behind a request.

    uvicorn has its transport at hand. Elsewhere it is the socket of this process with the addresses
    that the scope names: servers hide their sockets, also in other languages, but use the process's
    descriptors.
    """

    __slots__ = ("_ends", "_transport")

    def __init__(self, scope: Mapping[str, Any], receive: Any) -> None:
        self._transport = getattr(getattr(receive, "__self__", None), "transport", None)
        self._ends: Ends | None = None
        # A connection of HTTP/2 has other requests, too.
        if scope.get("http_version", "1.1").startswith("1"):
            client, server = scope.get("client"), scope.get("server")
            if client and server and server[1]:
                self._ends = _ends(client, server)

    def cut(self) -> bool:
        """Close the connection without writing the rest; return whether it could be found."""
        if self._transport is not None:
            self._transport.abort()
            return True
        descriptor = None if self._ends is None else _SOCKETS.find(self._ends)
        if descriptor is not None:
            cut_socket(descriptor)
        return descriptor is not None

    def cut_if_closing(self) -> None:
        """Cut the connection if the server waits until the client has read the response."""
        if self._transport is None or self._transport.is_closing():
            self.cut()


class _Sockets:
    """The TCP connections of this process, by the addresses of their ends."""

    def __init__(self) -> None:
        self._descriptors: dict[Ends, int] = {}
        self._until = 0.0

    def find(self, ends: Ends) -> int | None:
        if time.monotonic() > self._until:
            self._list()
        found = self._descriptors.pop(ends, None)
        return found if found is not None and _ends_of(found) == ends else None

    def _list(self) -> None:
        self._descriptors.clear()
        with suppress(OSError):  # a system without this directory
            for name in os.listdir("/dev/fd"):
                if (ends := _ends_of(int(name))) is not None:
                    self._descriptors[ends] = int(name)
        self._until = time.monotonic() + FRESH


_SOCKETS = _Sockets()


def _ends_of(descriptor: int) -> Ends | None:
    with suppress(OSError):  # closed meanwhile, or not connected
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            line = socket.socket(fileno=descriptor)
            try:
                if line.family in (socket.AF_INET, socket.AF_INET6):
                    return _ends(line.getpeername(), line.getsockname())
            finally:
                line.detach()
    return None


def _ends(client: Any, server: Any) -> Ends:
    # A socket for both IPv6 and IPv4 has the latter's addresses in another form, and granian's
    # scope has ports as strings.
    return str(client[0]).removeprefix("::ffff:"), int(client[1]), int(server[1])
