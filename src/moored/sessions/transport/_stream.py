"""A TCP connection as a transport, and the base class of the layers above one (TLS, WebSocket).

A process may have thousands of these, so they are small: no stream reader, no task, no read buffer
of their own. All connections of a loop share one buffer: a loop reads one connection at a time, and
the data is copied immediately.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ._transport import Receiver, Transport

__all__ = ["Dialler", "Layer", "Stream", "read_buffer"]

#: Connects a transport for a receiver.
Dialler: TypeAlias = Callable[[Receiver], Awaitable[Transport]]

# Larger reads would save little: few messages are as long as this.
_READ_SIZE = 64 * 1024
# Seconds until a closed connection is aborted if the peer does not read the rest.
_CLOSING_TIME = 5.0
# TCP keepalive, below that of the protocols: a vanished peer is detected within 2 minutes.
_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 15),
        ("TCP_KEEPCNT", 4),
        # Unsent data stays in our buffer, so that `pending` shows whether the peer reads.
        ("TCP_NOTSENT_LOWAT", 128 * 1024),
    )
    if hasattr(socket, name)
]

# Close with RST, and drop unsent data.
_NO_LINGER = struct.pack("ii", 1, 0)

_buffers: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """Return the read buffer that all connections of a loop share."""
    buffer = _buffers.get(loop)
    if buffer is None:
        buffer = _buffers[loop] = memoryview(bytearray(_READ_SIZE))
    return buffer


class Stream(asyncio.BufferedProtocol):
    """One TCP connection.

    :param buffer: the buffer that the loop reads into, from `read_buffer`.
    :param receiver: gets the received data; without one nothing is read until `adopt`.
    """

    __slots__ = ("_buffer", "_early", "_error", "_timer", "_transport", "receiver")

    keeps_bounds = False

    def __init__(self, buffer: memoryview, receiver: Receiver | None = None) -> None:
        self._buffer = buffer
        # Data read without a receiver: uvloop reads after `connection_made`, even if that has
        # paused reading.
        self._early = b""
        self.receiver = receiver
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None

    # -- called by the event loop --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's options. (The loop has already set TCP_NODELAY.)"""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
        except OSError:
            pass  # already disconnected, which the loop will report
        if self.receiver is None:
            self._transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        """Give the received bytes to the receiver."""
        data = bytes(self._buffer[:count])
        if self.receiver is not None:
            self._give(self.receiver, data)
        else:
            self._early += data
            self._transport.pause_reading()

    def _give(self, receiver: Receiver, data: bytes) -> None:
        try:
            receiver.received(data)
        except Exception as error:
            self._error = error
            self.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        """Report the end of the connection to the receiver."""
        self._catch_up()
        receiver, self.receiver, self._transport = self.receiver, None, None
        if self._timer is not None:
            self._timer.cancel()
        if receiver is not None:
            receiver.lost(self._error or error)

    def adopt(self, receiver: Receiver) -> None:
        """Give the connection a receiver, and begin to read."""
        if self._transport is None:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.receiver = receiver
        if self._early:
            # Not from within this call: the receiver may not be ready yet.
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._transport.resume_reading()

    def _go_on(self) -> None:
        self._catch_up()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _catch_up(self) -> None:
        early, self._early = self._early, b""
        if early and self.receiver is not None:
            self._give(self.receiver, early)

    def pause(self) -> None:
        """Stop reading until `adopt`."""
        self.receiver = None
        if self._transport is not None:
            self._transport.pause_reading()

    # -- called by the owner -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes as soon as possible."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    @property
    def pending(self) -> int:
        """The number of bytes in the send buffer."""
        transport = self._transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def close(self) -> None:
        """Flush the send buffer and close; abort after 5 s if the peer does not read it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.close()
        if transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSING_TIME, self.abort)

    def abort(self) -> None:
        """Close immediately; data that the kernel has not sent yet is dropped as well."""
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        try:
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        except OSError:
            pass  # already disconnected
        transport.abort()


class Layer:
    """A transport on top of another transport, with a handshake of its own.

    A subclass sends the first bytes in `_begin`, handles received bytes in `_digest`, and calls
    `_opened` when its handshake is complete.
    """

    __slots__ = ("_below", "_closed", "_error", "_opening", "_receiver")

    keeps_bounds = False

    def __init__(self, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._below: Transport | None = None
        self._opening: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._closed = False

    async def open(self, dial: Dialler) -> None:
        """Connect the transport below, then this one; a failure is raised, not reported."""
        opening = self._opening = asyncio.get_running_loop().create_future()
        try:
            self._below = await dial(self)
            if not opening.done():
                self._begin()
            await opening
        except BaseException:
            self._opening = self._receiver = None
            self.abort()
            if opening.done() and not opening.cancelled():
                opening.exception()  # retrieved, so that asyncio does not log it
            raise

    def _begin(self) -> None:
        """Begin the handshake: the transport below is connected."""
        raise NotImplementedError

    def _digest(self, data: bytes) -> None:
        """Handle bytes from the transport below."""
        raise NotImplementedError

    def _opened(self) -> None:
        """End the handshake."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.set_result(None)

    def _refused(self, error: BaseException) -> bool:
        """Fail the handshake with this error, raised by `open`; return False if it was complete."""
        opening, self._opening = self._opening, None
        if opening is None:
            return False
        self._receiver = None
        if not opening.done():
            opening.set_exception(error)
        return True

    def _give(self, data: bytes) -> None:
        """Give bytes to the receiver, unless this layer is closed."""
        if self._receiver is not None and not self._closed:
            self._receiver.received(data)

    def _fail(self, error: BaseException, *, flush: bool = False) -> None:
        """End the connection with an error; `flush` if the peer is to get what was written."""
        self._closed = True
        if not self._refused(error) and self._error is None:
            self._error = error
        if self._below is not None:
            if flush:
                self._below.close()
            else:
                self._below.abort()

    # -- called by the transport below ---------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Handle bytes from the transport below."""
        if self._below is None:
            self._fail(ConnectionError("the server sent data before the handshake"))
            return
        try:
            self._digest(data)
        except Exception as error:
            self._fail(error)

    def lost(self, error: BaseException | None) -> None:
        """Handle the end of the transport below."""
        self._closed = True
        self._refused(error or ConnectionResetError(errno.ECONNRESET, "closed in the handshake"))
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lost(self._error or error)

    # -- called by the owner -------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The number of bytes in the send buffer."""
        return 0 if self._below is None else self._below.pending

    def abort(self) -> None:
        """Close immediately and drop the send buffer."""
        self._closed = True
        if self._below is not None:
            self._below.abort()
