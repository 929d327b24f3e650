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
    """The TCP connections of this process, by the addresses of their ends.

    Of ten thousand, the first list takes a fifth of a second; later ones query the new sockets.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Ends, int] = {}
        # The inode of each socket, which no other one has at the time, and its ends.
        self._queried: dict[int, tuple[int, Ends | None]] = {}
        self._until = 0.0

    def find(self, ends: Ends) -> int | None:
        found = self._listed(ends)
        if found is None and time.monotonic() > self._until:
            self._list()
            found = self._listed(ends)
        return found

    def _listed(self, ends: Ends) -> int | None:
        found = self._descriptors.get(ends)
        return found if found is not None and _ends_of(found) == ends else None

    def _list(self) -> None:
        before, self._queried = self._queried, {}
        with suppress(OSError):  # a system without this directory
            for descriptor in map(int, os.listdir("/dev/fd")):
                if (inode := _inode(descriptor)) is None:
                    continue
                queried = before.get(descriptor)
                if queried is None or queried[0] != inode or not inode:
                    queried = inode, _ends_of(descriptor)
                self._queried[descriptor] = queried
        found = self._queried.items()
        self._descriptors = {ends: each for each, (_, ends) in found if ends is not None}
        self._until = time.monotonic() + FRESH


_SOCKETS = _Sockets()


def _inode(descriptor: int) -> int | None:
    """Return the inode of a socket, 0 on systems where it has none; None for another file."""
    with suppress(OSError):  # closed meanwhile
        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            return found.st_ino
    return None


def _ends_of(descriptor: int) -> Ends | None:
    with suppress(OSError):  # closed meanwhile, or not connected
        # With socket.setdefaulttimeout(), a new object makes the socket non-blocking.
        blocking = os.get_blocking(descriptor)
        line = socket.socket(fileno=descriptor)
        try:
            if line.family in (socket.AF_INET, socket.AF_INET6):
                return _ends(line.getpeername(), line.getsockname())
        finally:
            line.detach()
            os.set_blocking(descriptor, blocking)
    return None


def _ends(client: Any, server: Any) -> Ends:
    # A socket for both IPv6 and IPv4 has the latter's addresses in another form, and granian's
    # scope has ports as strings.
    return str(client[0]).removeprefix("::ffff:"), int(client[1]), int(server[1])
