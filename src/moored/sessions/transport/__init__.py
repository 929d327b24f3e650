"""What carries the bytes of a link: TCP, TLS, WebSocket, and an in-memory pair."""

from ._endpoints import InMemory, Tcp, WebSocket, default_tls
from ._stream import Stream, read_buffer
from ._transport import Endpoint, Receiver, Transport

__all__ = [
    "Endpoint",
    "InMemory",
    "Receiver",
    "Stream",
    "Tcp",
    "Transport",
    "WebSocket",
    "default_tls",
    "read_buffer",
]
