"""A WebSocket on top of a transport: the rules are those of the `websockets` package.

One write is one message, and one message is given to the receiver in one piece, so that protocols
with a frame per message and protocols with a stream of bytes can both be carried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from ..link import Link
from ._stream import Layer
from ._transport import Receiver

__all__ = ["WebSocketClosed", "WebSocketLink", "WebSocketRefused"]

# Seconds that a server has to close the connection after the closing handshake has begun.
_CLOSING_TIME = 5.0
# "Normal closure" and "going away": the server has nothing to complain about.
_POLITE = (1000, 1001, 1005)

# Not below INFO, whatever is set elsewhere: there the package logs what is sent.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.INFO)


class WebSocketRefused(ConnectionError):
    """The server did not agree to speak WebSocket."""

    #: The HTTP status of its answer, if that was the reason.
    status: int | None = None


class WebSocketClosed(ConnectionError):
    """The WebSocket was closed with a complaint, or without a word."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        #: The code of RFC 6455: 1006 for no word at all.
        self.code = code


class WebSocketLink(Layer):
    """One WebSocket, at the client's end."""

    __slots__ = ("_core", "_fragments", "_headers", "_kind", "_max_size", "_timer")

    keeps_bounds = True

    def __init__(
        self,
        receiver: Receiver,
        url: str,
        *,
        subprotocol: str | None,
        headers: Iterable[tuple[str, str]],
        text: bool,
        max_size: int,
    ) -> None:
        super().__init__(receiver)
        self._core = ClientProtocol(
            parse_uri(url),
            subprotocols=None if subprotocol is None else [Subprotocol(subprotocol)],
            max_size=max_size,
            logger=_logger,
        )
        self._headers = headers
        self._max_size = max_size
        self._kind = Opcode.TEXT if text else Opcode.BINARY
        self._fragments: list[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- the handshake -------------------------------------------------------------------------

    def _begin(self) -> None:
        request = self._core.connect()
        for name, value in self._headers:
            request.headers[name] = value
        self._headers = ()
        self._core.send_request(request)
        self._flush()

    def _greeted(self) -> None:
        """The answer to the handshake is there, if not refused."""
        wanted, got = self._core.available_subprotocols, self._core.subprotocol
        if (error := self._core.handshake_exc) is not None:
            self._fail(_refusal(error))
        elif wanted is not None and got is None:
            self._fail(WebSocketRefused(f"the server does not speak {wanted[0]!r}"))
        else:
            self._opened()

    # -- what comes ----------------------------------------------------------------------------

    def _digest(self, data: bytes) -> None:
        core = self._core
        core.receive_data(data)
        events = core.events_received()
        if self._opening is not None and (core.state is not State.CONNECTING or core.handshake_exc):
            self._greeted()
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
            assert self._fragments is not None  # the core sees to that
            if frame.data:  # of those without, there may be any number
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
            self._core.fail(1003, f"only {self._kind.name.lower()} frames are understood")
            self._error = WebSocketClosed(f"the server sent a {opcode.name.lower()} frame", 1003)

    def _partly(self) -> None:
        """A message comes in parts, and may take longer than its server may be silent.

        (Not so a ping: of whatever is between here and the server, that may be all that lives.)
        """
        if self._opening is None and isinstance(self._receiver, Link):
            self._receiver.heard()

    def _ending(self) -> None:
        """One side has said goodbye, or has broken the rules."""
        self._closed = True
        broken = self._core.parser_exc
        if self._error is None and broken is not None and not isinstance(broken, EOFError):
            sent = self._core.close_sent
            code = 1002 if sent is None else sent.code
            what = f"the server broke the rules: {broken}"
            if code == 1009:
                what = f"the server sent a message that is longer than max_size={self._max_size}"
            self._error = WebSocketClosed(what, code)
        if self._error is not None and self._below is not None:
            self._below.close()  # there is no answer to wait for
        if self._timer is None and self._below is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSING_TIME, self._below.abort)

    def lost(self, error: BaseException | None) -> None:
        """What is below is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if error is None:
            error = self._unfinished() if self._opening is not None else self._complaint()
        super().lost(error)

    def _unfinished(self) -> WebSocketRefused | None:
        """What is to be said of an answer to the handshake that ended with the connection."""
        self._core.receive_eof()
        error = self._core.handshake_exc
        if error is None or isinstance(error.__cause__, EOFError):
            return None
        return _refusal(error)

    def _complaint(self) -> WebSocketClosed | None:
        """Why it ended, if not in good order."""
        said, ours = self._core.close_rcvd, self._core.close_sent
        if said is not None and said.code not in _POLITE:
            words = f" ({said.reason})" if said.reason else ""
            return WebSocketClosed(f"the server closed it with {said.code}{words}", said.code)
        if said is None and ours is None and not self._closed:
            return WebSocketClosed("the server closed it without a word", 1006)
        return None

    # -- what its owner calls ------------------------------------------------------------------

    def _flush(self) -> None:
        assert self._below is not None
        for data in self._core.data_to_send():
            if data:
                self._below.write(data)
            else:
                self._below.close()

    def write(self, data: bytes) -> None:
        """Send a message, as soon as that is possible."""
        if self._closed or not data:
            return
        core = self._core
        if self._kind is Opcode.BINARY:
            core.send_binary(data)
        else:
            core.send_text(data)
        assert self._below is not None
        self._below.write(core.writes.pop())

    def close(self) -> None:
        """Send what is pending, say goodbye, and end when the server has done so too."""
        if self._closed:
            return
        self._core.send_close(1000)
        self._flush()
        self._ending()


def _refusal(error: Exception) -> WebSocketRefused:
    refused = WebSocketRefused(str(error))
    refused.__cause__ = error
    if isinstance(error, InvalidStatus):
        refused.status = error.response.status_code
        refused.args = (f"the server answered with HTTP {refused.status}",)
    return refused
