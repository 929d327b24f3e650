"""The endpoints that a session can connect to: TCP, TLS, WebSocket, or within the process.

An endpoint has no timeout: its caller cancels `dial`. The receiver is not called for a dial that
fails or is cancelled. It may be called before `dial` has returned, if the server sends first.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from moored.kernel import SECRETS, extra

from ._memory import memory_pair
from ._stream import Dialler, Stream
from ._tcp_dial import cannot_connect, dial_stream
from ._tls import TlsLink, default_tls
from ._transport import Receiver, Transport

__all__ = ["InMemory", "MemoryServer", "Tcp", "WebSocket", "default_tls"]

#: A server within the process: gets its end of a connection, and returns the receiver for it.
MemoryServer: TypeAlias = Callable[[Transport], Receiver]


@dataclass(slots=True, eq=False, repr=False)
class Tcp:
    """A server on a TCP port."""

    #: Its name or address; all addresses of a name are tried, IPv6 and IPv4 in turn.
    host: str
    port: int
    _: KW_ONLY
    #: The context that verifies the server's certificate; None for no TLS.
    tls: ssl.SSLContext | None = None
    #: The name that the certificate must have, if it is not the host's.
    server_name: str | None = None
    #: Begin without TLS, until the protocol reports `StartTls`; a link that becomes ready before
    #: that is closed.
    starttls: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if not self.host:
            wrong.append("host is empty")
        if not 0 < self.port < 65536:
            wrong.append(f"port is {self.port}, and must be from 1 to 65535")
        needy = [name for name in ("server_name", "starttls") if getattr(self, name)]
        if self.tls is None:
            wrong += [f"{name} needs TLS: pass tls as well" for name in needy]
        if wrong:
            raise ValueError("; ".join(wrong))

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` with the reason."""
        try:
            return await self._open(receiver)
        except OSError as error:
            raise cannot_connect(str(self), error) from error

    async def _open(self, receiver: Receiver) -> Transport:
        if self.tls is None or self.starttls:
            return await dial_stream(self.host, self.port, receiver)
        return await self._encrypt(
            self.tls, receiver, lambda layer: dial_stream(self.host, self.port, layer)
        )

    async def secure(self, transport: Transport, receiver: Receiver) -> Transport:
        """Upgrade a paused connection to TLS (STARTTLS)."""
        assert self.tls is not None
        assert isinstance(transport, Stream)

        async def below(layer: Receiver) -> Transport:
            transport.adopt(layer)
            return transport

        try:
            return await self._encrypt(self.tls, receiver, below)
        except OSError as error:
            raise cannot_connect(str(self), error) from error

    async def _encrypt(self, tls: ssl.SSLContext, receiver: Receiver, dial: Dialler) -> Transport:
        name = self.server_name or self.host
        try:
            link = TlsLink(receiver, tls, name)
        except ValueError as error:
            raise OSError(errno.EINVAL, f"{name!r} is not a valid TLS name: {error}") from error
        await link.open(dial)
        return link

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        how = " (STARTTLS)" if self.starttls else " (TLS)" if self.tls is not None else ""
        return f"{host}:{self.port}{how}"

    def __repr__(self) -> str:
        return f"<Tcp {self}>"


@dataclass(slots=True, eq=False, repr=False)
class WebSocket:
    """A server at a WebSocket URL; each write of the protocol is one frame."""

    #: `ws://` or `wss://`; a user and a password in it are sent as basic authentication.
    url: str
    _: KW_ONLY
    #: The subprotocol to use, such as `mqtt`; the dial fails if the server does not support it.
    subprotocol: str | None = None
    #: For `wss`: the context that verifies the server's certificate; by default, it trusts the
    #: system's authorities.
    tls: ssl.SSLContext | None = None
    #: More headers for the handshake, as pairs.
    headers: Iterable[tuple[str, str]] = ()
    #: Send and expect text frames (UTF-8), not binary ones.
    text: bool = False
    #: The longest accepted message, in bytes; a longer one ends the link.
    max_size: int = 1024 * 1024
    _tcp: Tcp = field(init=False)

    def __post_init__(self) -> None:
        with extra("mqtt", "WebSocket"):
            from websockets.exceptions import InvalidURI
            from websockets.uri import parse_uri
        SECRETS.add_from(self.url)
        try:
            uri = parse_uri(self.url)
        except (InvalidURI, ValueError) as error:
            # Without the URL, which may hold a password; and a port's error quotes a part of it.
            why = getattr(error, "msg", "a part of it cannot be decoded")
            raise ValueError(f"the WebSocket URL is not valid: {why}") from None
        if self.tls is not None and not uri.secure:
            raise ValueError("the WebSocket URL is not encrypted, but tls is given: use wss://")
        self.headers = tuple(self.headers)
        for name, value in self.headers:
            if name.lower() == "authorization":
                SECRETS.add(value.rpartition(" ")[2])  # "Bearer TOKEN"
        if any(set("\r\n") & {*name, *value} for name, value in self.headers):
            raise ValueError("a header contains a line break")
        self._tcp = Tcp(uri.host, uri.port, tls=(self.tls or default_tls()) if uri.secure else None)

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` with the reason."""
        from ._websocket import WebSocketLink

        link = WebSocketLink(receiver, self)
        try:
            await link.open(self._tcp._open)
        except OSError as error:
            raise cannot_connect(str(self), error) from error
        return link

    def __str__(self) -> str:
        # The query may hold a token, and the user information a password.
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}" + ("?…" if parts.query else "")

    def __repr__(self) -> str:
        return f"<WebSocket {self}>"


@dataclass(slots=True, eq=False, repr=False)
class InMemory:
    """A server in this process."""

    # Called with the server's end of each connection; returns the receiver for it, or raises
    # `OSError` to refuse the connection.
    _server: MemoryServer
    name: str = "memory"

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` if the server refuses."""
        near, far = memory_pair()
        near.receiver = receiver
        try:
            far.receiver = self._server(far)
        except OSError as error:
            raise cannot_connect(str(self), error) from error
        return near

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<InMemory {self.name}>"
