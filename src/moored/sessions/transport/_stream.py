"""A TCP connection as a transport, and what the layers above one (TLS, WebSocket) have in common.

A process may have thousands of these, so they are small: no stream reader, no task, no read buffer
of their own. All connections of a loop share one buffer, because a loop reads one at a time and
what was read is copied at once.
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

#: Something that makes a transport for a receiver.
Dialler: TypeAlias = Callable[[Receiver], Awaitable[Transport]]

# Larger reads would save little, and a message is rarely as long as this.
_READ_SIZE = 64 * 1024
# Seconds that a peer has to take what is pending when the connection is closed.
_CLOSING_TIME = 5.0
# A last resort below the protocols' own signs of life: a peer that is gone is noticed in 2 minutes.
_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 15),
        ("TCP_KEEPCNT", 4),
        # What cannot be sent yet waits with us, where it can be seen to become less.
        ("TCP_NOTSENT_LOWAT", 128 * 1024),
    )
    if hasattr(socket, name)
]

# Closing drops what is left, and tells the peer so (RST).
_NO_LINGER = struct.pack("ii", 1, 0)

_buffers: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()


def read_buffer(loop: asyncio.AbstractEventLoop) -> memoryview:
    """What all connections of a loop read into."""
    buffer = _buffers.get(loop)
    if buffer is None:
        buffer = _buffers[loop] = memoryview(bytearray(_READ_SIZE))
    return buffer


class Stream(asyncio.BufferedProtocol):
    """One TCP connection.

    :param buffer: what the loop reads into, from `read_buffer`.
    :param receiver: who gets what comes in; without one nothing is read until `adopt`.
    """

    __slots__ = ("_buffer", "_early", "_error", "_timer", "_transport", "receiver")

    keeps_bounds = False

    def __init__(self, buffer: memoryview, receiver: Receiver | None = None) -> None:
        self._buffer = buffer
        # What was read while there was no receiver: uvloop reads after `connection_made`, even if
        # that has paused it.
        self._early = b""
        self.receiver = receiver
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None

    # -- what the loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open. (The loop has switched Nagle's algorithm off already.)"""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
        except OSError:
            pass  # it is gone again, which the loop will find out by itself
        if self.receiver is None:
            self._transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what comes in."""
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        """So many bytes have come in."""
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
        """It is over."""
        self._catch_up()
        receiver, self.receiver, self._transport = self.receiver, None, None
        if self._timer is not None:
            self._timer.cancel()
        if receiver is not None:
            receiver.lost(self._error or error)

    def adopt(self, receiver: Receiver) -> None:
        """Somebody wants it after all."""
        if self._transport is None:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.receiver = receiver
        if self._early:
            # Later: whoever adopts it may not be ready to hear something from within this call.
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
        """Read nothing until `adopt`."""
        self.receiver = None
        if self._transport is not None:
            self._transport.pause_reading()

    def mute(self) -> None:
        """Nobody wants to hear of it any more."""
        self.receiver = None

    # -- what its owner calls ------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes, as soon as that is possible."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    @property
    def pending(self) -> int:
        """How many bytes wait to be sent."""
        transport = self._transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def close(self) -> None:
        """Send what is pending, then end; a peer that reads nothing cannot delay that for ever."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.close()
        if transport.get_write_buffer_size():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSING_TIME, self.abort)

    def abort(self) -> None:
        """End now: what the system was given and has not sent is not sent either."""
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        try:
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        except OSError:
            pass  # it is gone already
        transport.abort()

    def __repr__(self) -> str:
        if self._transport is None:
            return "<Stream, closed>"
        peer = self._transport.get_extra_info("peername") or ("?", "?")
        state = "closing" if self._transport.is_closing() else "open"
        return f"<Stream to {peer[0]}:{peer[1]}, {state}, {self.pending} bytes pending>"


class Layer:
    """A transport on top of another: the receiver of what is below, with a handshake first.

    A subclass says what it sends first (`_begin`), what it makes of what comes (`_digest`), and
    calls `_opened` when its handshake is over.
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
        """Connect what is below, then this; if that fails, the receiver hears nothing of it."""
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
                opening.exception()  # so that nobody is told that it was never looked at
            raise

    def _begin(self) -> None:
        """What is below is open."""
        raise NotImplementedError

    def _digest(self, data: bytes) -> None:
        """Bytes have come from below."""
        raise NotImplementedError

    def _opened(self) -> None:
        """The handshake is over."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.set_result(None)

    def _refused(self, error: BaseException) -> bool:
        """The handshake has failed, if it was not over; whoever dials is told, nobody else."""
        opening, self._opening = self._opening, None
        if opening is None:
            return False
        self._receiver = None
        if not opening.done():
            opening.set_exception(error)
        return True

    def _give(self, data: bytes) -> None:
        """Hand bytes to the receiver, unless it has seen the end."""
        if self._receiver is not None and not self._closed:
            self._receiver.received(data)

    def _fail(self, error: BaseException, *, flush: bool = False) -> None:
        """End it for a reason; `flush` what was written to tell the other side."""
        self._closed = True
        if not self._refused(error) and self._error is None:
            self._error = error
        if self._below is not None:
            if flush:
                self._below.close()
            else:
                self._below.abort()

    # -- what is below calls -------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes have come from below."""
        if self._below is None:
            self._fail(ConnectionError("the server spoke before it was asked"))
            return
        try:
            self._digest(data)
        except Exception as error:
            self._fail(error)

    def lost(self, error: BaseException | None) -> None:
        """What is below is gone."""
        self._closed = True
        self._refused(error or ConnectionResetError(errno.ECONNRESET, "closed in the handshake"))
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lost(self._error or error)

    # -- what its owner calls ------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many bytes wait to be sent."""
        return 0 if self._below is None else self._below.pending

    def abort(self) -> None:
        """End now, whatever is pending."""
        self._closed = True
        if self._below is not None:
            self._below.abort()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__}, {state}, over {self._below!r}>"
