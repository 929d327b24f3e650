"""Where links lead: over TCP, with or without TLS, over WebSocket, or within the process.

An endpoint has no time limit of its own: whoever dials has one, and cancels. A receiver hears
nothing of a dial that fails or is cancelled; of one that succeeds it may hear before `dial` has
returned, if the server speaks first.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterable
from typing import TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from moored.kernel import extra

from ._memory import memory_pair
from ._stream import Dialler, Stream
from ._tcp_dial import cannot_connect, dial_stream
from ._tls import TlsLink, default_tls
from ._transport import Receiver, Transport

__all__ = ["InMemory", "MemoryServer", "Tcp", "WebSocket", "default_tls"]

#: What serves a link within the process: gets its end of it, and returns who receives there.
MemoryServer: TypeAlias = Callable[[Transport], Receiver]

_PORTS = {"ws": 80, "wss": 443}


class Tcp:
    """A server behind a TCP port.

    :param host: its name or address; all addresses of a name are tried, IPv6 and IPv4 in turn.
    :param tls: what the server's certificate is checked with; None for a connection without TLS.
    :param server_name: the name that the certificate must have; the host's by default.
    :param starttls: begin without TLS, until the protocol says `StartTls`; a link that is ready
        before that is closed.
    """

    __slots__ = ("host", "port", "server_name", "starttls", "tls")

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        starttls: bool = False,
    ) -> None:
        wrong = []
        if not host:
            wrong.append("host is empty")
        if not 0 < port < 65536:
            wrong.append(f"port is {port}, and must be from 1 to 65535")
        if server_name is not None and tls is None:
            wrong.append("server_name is for TLS: pass tls as well")
        if starttls and tls is None:
            wrong.append("starttls is for TLS: pass tls as well")
        if wrong:
            raise ValueError("; ".join(wrong))
        self.host = host
        self.starttls = starttls
        self.port = port
        self.tls = tls
        self.server_name = server_name

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` that says what failed."""
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
        """Go on with a link over TLS, from which nothing is read meanwhile (STARTTLS)."""
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
            raise OSError(errno.EINVAL, f"{name!r} is no name for TLS: {error}") from error
        await link.open(dial)
        return link

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        how = " (STARTTLS)" if self.starttls else " (TLS)" if self.tls is not None else ""
        return f"{host}:{self.port}{how}"

    def __repr__(self) -> str:
        return f"<Tcp {self}>"


class WebSocket:
    """A server behind a WebSocket URL; each send, greeting or acknowledgement is a frame.

    :param url: `ws://` or `wss://`; a user and a password in it are sent as basic authentication.
    :param subprotocol: what is spoken over it, such as `mqtt`; a server that does not is refused.
    :param tls: for `wss`: what the server's certificate is checked with; what the system trusts by
        default.
    :param headers: more headers for the handshake, as pairs.
    :param text: send and expect text frames (UTF-8), not binary ones.
    :param max_size: the longest message that is accepted, in bytes; a longer one ends the link.
    """

    __slots__ = ("_headers", "_tcp", "_url", "max_size", "subprotocol", "text")

    def __init__(
        self,
        url: str,
        *,
        subprotocol: str | None = None,
        tls: ssl.SSLContext | None = None,
        headers: Iterable[tuple[str, str]] = (),
        text: bool = False,
        max_size: int = 1024 * 1024,
    ) -> None:
        with extra("mqtt", "WebSocket"):
            import websockets  # noqa: F401
        parts = _parts(url, tls)
        secure = parts.scheme == "wss"
        assert parts.hostname is not None
        self._url = url
        self._headers = tuple(headers)
        if any(set("\r\n") & {*name, *value} for name, value in self._headers):
            raise ValueError("a header has the end of a line in it")
        self._tcp = Tcp(
            parts.hostname,
            parts.port or _PORTS[parts.scheme],
            tls=(tls or default_tls()) if secure else None,
        )
        self.subprotocol = subprotocol
        self.text = text
        self.max_size = max_size

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` that says what failed."""
        from ._websocket import WebSocketLink

        link = WebSocketLink(
            receiver,
            self._url,
            subprotocol=self.subprotocol,
            headers=self._headers,
            text=self.text,
            max_size=self.max_size,
        )
        try:
            await link.open(self._tcp._open)
        except OSError as error:
            raise cannot_connect(str(self), error) from error
        return link

    def __str__(self) -> str:
        # A query may hold a token, and what is before the host a password.
        parts = urlsplit(self._url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}" + ("?…" if parts.query else "")

    def __repr__(self) -> str:
        return f"<WebSocket {self}>"


def _parts(url: str, tls: ssl.SSLContext | None) -> SplitResult:
    """The parts of a URL that is right; no error shows more of it than its scheme."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise ValueError(f"the URL of a WebSocket begins with ws:// or wss://, not {parts.scheme}:")
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    wrong = []
    if not parts.hostname:
        wrong.append("has no host")
    if not port_is_right:
        wrong.append("has no valid port")
    if parts.fragment:
        wrong.append("has a fragment (#…), which means nothing here")
    if parts.username is not None and parts.password is None:
        wrong.append("has a user without a password")
    try:
        unquote(parts.netloc, errors="strict")
    except UnicodeDecodeError:
        wrong.append("has a user or a password that is not UTF-8")
    if parts.scheme == "ws" and tls is not None:
        wrong.append("is not encrypted, but tls is given: use wss://")
    if wrong:
        raise ValueError("the URL of the WebSocket " + "; it ".join(wrong))
    return parts


class InMemory:
    """A server in this process.

    :param server: called for each link with the server's end; returns who receives there. It may
        raise `OSError`, to refuse.
    """

    __slots__ = ("_server", "name")

    def __init__(self, server: MemoryServer, *, name: str = "memory") -> None:
        self._server = server
        self.name = name

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect; raises `OSError` if the server does."""
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
