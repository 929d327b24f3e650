"""A WebSocket on top of a transport, with the sans-I/O protocol of the `websockets` package.

One write is one message, and the receiver gets each message in one piece, so that protocols with
one frame per message and protocols with a stream of bytes both work.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from ._stream import Layer
from ._transport import PartReceiver, Receiver

if TYPE_CHECKING:
    from ._endpoints import WebSocket

__all__ = ["WebSocketClosed", "WebSocketLink", "WebSocketRefused"]

# Seconds that a server has to close the connection after the closing handshake has begun.
_CLOSING_TIME = 5.0
# Normal closure, going away, and no status: closed without an error.
_POLITE = (1000, 1001, 1005)

# Never below INFO: at DEBUG the package logs the contents of messages.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.INFO)


class WebSocketRefused(ConnectionError):
    """The server refused the WebSocket handshake."""


class WebSocketClosed(ConnectionError):
    """The WebSocket was closed with an error code, or without a close frame."""


class WebSocketLink(Layer):
    """One WebSocket connection of a client."""

    __slots__ = ("_core", "_endpoint", "_fragments", "_kind", "_timer")

    keeps_bounds = True

    def __init__(self, receiver: Receiver, endpoint: WebSocket) -> None:
        super().__init__(receiver)
        wanted = endpoint.subprotocol
        self._core = ClientProtocol(
            parse_uri(endpoint.url),
            subprotocols=None if wanted is None else [Subprotocol(wanted)],
            max_size=endpoint.max_size,
            logger=_logger,
        )
        self._endpoint = endpoint
        self._kind = Opcode.TEXT if endpoint.text else Opcode.BINARY
        self._fragments: list[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- the handshake -------------------------------------------------------------------------

    def _begin(self) -> None:
        request = self._core.connect()
        for name, value in self._endpoint.headers:
            request.headers[name] = value
        self._core.send_request(request)
        self._flush()

    def _handshake_done(self) -> None:
        """Open or fail the connection, as the response to the handshake says."""
        wanted, got = self._core.available_subprotocols, self._core.subprotocol
        if (error := self._core.handshake_exc) is not None:
            self._fail(_refusal(error))
        elif wanted is not None and got is None:
            self._fail(WebSocketRefused(f"the server does not support {wanted[0]!r}"))
        else:
            self._opened()

    # -- receiving -----------------------------------------------------------------------------

    def _digest(self, data: bytes) -> None:
        core = self._core
        core.receive_data(data)
        events = core.events_received()
        if self._opening is not None and (core.state is not State.CONNECTING or core.handshake_exc):
            self._handshake_done()
        for event in events:
            if isinstance(event, Frame) and not self._closed:
                self._take(event)
        if not events:
            self._partly()
        if core.writes:
            self._flush()
        if core.state is State.CLOSING:
            self._ending()

    def _take(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode is Opcode.CONT:
            assert self._fragments is not None  # the core has checked the order of frames
            if frame.data:  # a peer may send any number of empty frames
                self._fragments.append(bytes(frame.data))
                self._partly()
            if frame.fin:
                whole, self._fragments = b"".join(self._fragments), None
                self._give(whole)
        elif opcode is self._kind:
            if frame.fin:
                self._give(bytes(frame.data))
            else:
                self._fragments = [bytes(frame.data)]
                self._partly()
        elif opcode is Opcode.TEXT or opcode is Opcode.BINARY:
            self._core.fail(1003, f"only {self._kind.name.lower()} frames are supported")
            self._error = WebSocketClosed(f"the server sent a {opcode.name.lower()} frame")

    def _partly(self) -> None:
        """Report a part of a message: a large one may take longer than the keepalive allows.

        (A ping is not reported: a proxy may answer pings although the server behind it is dead.)
        """
        if self._opening is None and isinstance(self._receiver, PartReceiver):
            self._receiver.heard()

    def _ending(self) -> None:
        """End the connection: one side has sent a close frame, or violated the protocol."""
        self._closed = True
        broken = self._core.parser_exc
        if self._error is None and broken is not None and not isinstance(broken, EOFError):
            sent = self._core.close_sent
            what = f"the server violated the protocol: {broken}"
            if sent is not None and sent.code == 1009:
                longest = self._endpoint.max_size
                what = f"the server sent a message that is longer than max_size={longest}"
            self._error = WebSocketClosed(what)
        if self._error is not None and self._below is not None:
            self._below.close()  # no close frame will follow
        if self._timer is None and self._below is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSING_TIME, self._below.abort)

    def lost(self, error: BaseException | None) -> None:
        """Handle the end of the connection below."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if error is None:
            error = self._unfinished() if self._opening is not None else self._complaint()
        super().lost(error)

    def _unfinished(self) -> WebSocketRefused | None:
        """The error of a handshake whose response was cut off by the end of the connection."""
        self._core.receive_eof()
        error = self._core.handshake_exc
        if error is None or isinstance(error.__cause__, EOFError):
            return None
        return _refusal(error)

    def _complaint(self) -> WebSocketClosed | None:
        """The error with which the WebSocket was closed; None after a normal closure."""
        theirs, ours = self._core.close_rcvd, self._core.close_sent
        if theirs is not None and theirs.code not in _POLITE:
            why = f" ({theirs.reason})" if theirs.reason else ""
            return WebSocketClosed(f"the server closed the WebSocket with code {theirs.code}{why}")
        if theirs is None and ours is None and not self._closed:
            return WebSocketClosed(
                "the server closed the connection without a WebSocket close frame"
            )
        return None

    # -- sending and closing -------------------------------------------------------------------

    def _flush(self) -> None:
        assert self._below is not None
        for data in self._core.data_to_send():
            if data:
                self._below.write(data)
            else:
                self._below.close()

    def write(self, data: bytes) -> None:
        """Send a message as soon as possible."""
        core = self._core
        # The core parses a whole read: it may know of a close frame that is still to be handled.
        if self._closed or not data or core.state is not State.OPEN:
            return
        if self._kind is Opcode.BINARY:
            core.send_binary(data)
        else:
            core.send_text(data)
        assert self._below is not None
        self._below.write(core.writes.pop())

    def close(self) -> None:
        """Flush, send a close frame, and end when the server has answered it."""
        if self._closed:
            return
        if self._core.state is State.OPEN:
            self._core.send_close(1000)
        self._flush()
        self._ending()


def _refusal(error: Exception) -> WebSocketRefused:
    text = str(error)
    if isinstance(error, InvalidStatus):
        text = f"the server answered with HTTP {error.response.status_code}"
    refused = WebSocketRefused(text)
    refused.__cause__ = error
    return refused
