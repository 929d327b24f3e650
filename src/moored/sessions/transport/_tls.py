"""TLS on top of a transport.

The event loop's own TLS takes a quarter of a megabyte for each connection, most of it for one
buffer, and does not count the bytes in the socket's send buffer.
"""

from __future__ import annotations

import ssl
from functools import cache

from ._stream import Layer
from ._transport import Receiver

__all__ = ["TlsLink", "default_tls"]

_READ_SIZE = 64 * 1024


@cache
def default_tls() -> ssl.SSLContext:
    """The context with the system's authorities; shared, because each context is large."""
    return ssl.create_default_context()


class TlsLink(Layer):
    """One TLS connection."""

    __slots__ = ("_backlog", "_incoming", "_outgoing", "_tls")

    def __init__(self, receiver: Receiver, context: ssl.SSLContext, server_name: str) -> None:
        super().__init__(receiver)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        # Data that cannot be encrypted until the peer has agreed on new keys; rarely used.
        self._backlog = b""
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)

    def _begin(self) -> None:
        self._shake()

    def _digest(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._opening is not None:
            self._shake()
        if self._opening is None and not self._closed:
            self._read()

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # sends the TLS alert
            self._fail(error, flush=True)
        else:
            self._flush()
            self._opened()

    def _read(self) -> None:
        try:
            while not self._closed:
                data = self._tls.read(_READ_SIZE)
                if data:
                    self._give(data)
                else:
                    self.close()  # the peer has sent close_notify
        except ssl.SSLWantReadError:
            if self._backlog and not self._closed:
                backlog, self._backlog = self._backlog, b""
                self._encrypt(backlog)
            self._flush()
        except ssl.SSLError as error:
            self._flush()
            self._fail(error, flush=True)

    def _flush(self) -> None:
        if self._outgoing.pending and self._below is not None:
            self._below.write(self._outgoing.read())

    def _encrypt(self, data: bytes) -> None:
        try:
            while (count := self._tls.write(data)) < len(data):
                data = data[count:]
        except ssl.SSLWantReadError:
            self._backlog = data

    def write(self, data: bytes) -> None:
        """Send bytes as soon as possible."""
        if self._closed or not data:
            return
        if self._backlog:
            self._backlog += data
            return
        self._encrypt(data)
        self._flush()

    @property
    def pending(self) -> int:
        """The number of bytes in the send buffer."""
        return super().pending + len(self._backlog)

    def close(self) -> None:
        """Send close_notify, flush the send buffer, then close."""
        if self._closed:
            return
        self._closed = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # it wants the peer's close_notify, which is not awaited
        self._flush()
        if self._below is not None:
            self._below.close()
