"""The transport of a simulated connection.

It behaves like asyncio's socket transport: which calls raise, when `connection_lost` is called,
that `close` flushes and `abort` does not, when the protocol is paused.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ._pipe import FIN, NETWORK, RST, Pipe, Signal

if TYPE_CHECKING:
    from ._hosts import Process
    from ._loop import SimLoop
    from ._server import SimServer

__all__ = ["SimTransport"]


class SimTransport(asyncio.transports._FlowControlMixin):
    """One end of a simulated TCP connection."""

    incoming: Pipe
    outgoing: Pipe
    # Undocumented methods of asyncio's class that this class uses; a test guards them.
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]

    def __init__(
        self, loop: SimLoop, process: Process, context: Context, address: str, extra: dict[str, Any]
    ) -> None:
        super().__init__(extra, loop)
        self.loop = loop
        self.process = process
        self.context = context
        self.address = address
        self.server: SimServer | None = None
        self._protocol: asyncio.BaseProtocol | None = None
        self._inbox: deque[bytes | Signal] = deque()
        self._buffer = bytearray()
        self._reading = False
        self._at_eof = False
        self._writes_eof = False
        self._closing = False
        self._lost = False
        self._reset_sent = False
        self._give_up_timer: asyncio.TimerHandle | None = None
        process.transports[self] = None

    # The protocol

    def start(self, protocol: asyncio.BaseProtocol) -> None:
        """Connect the protocol, then deliver the bytes that have arrived."""
        self._protocol = protocol
        if self._closing:
            return
        protocol.connection_made(self)
        if not self._closing:
            self._reading = True
            self.wake()

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the current protocol."""
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol."""
        self._protocol = protocol

    def is_closing(self) -> bool:
        """Whether the transport is closed, or about to be."""
        return self._closing

    @property
    def gone(self) -> bool:
        """Whether the socket is closed."""
        return self._lost

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        peer = self.outgoing.receiver.address
        return (
            f"<SimTransport {self.address} -> {peer} {state}, {len(self._buffer)} bytes buffered>"
        )

    # Reading

    def is_reading(self) -> bool:
        """Whether arriving bytes are delivered to the protocol."""
        return self._reading and not self._closing and not self._at_eof

    def pause_reading(self) -> None:
        """Leave arriving bytes unread, so that the window fills."""
        self._reading = False

    def resume_reading(self) -> None:
        """Deliver arriving bytes again."""
        if not self._closing and not self._reading:
            self._reading = True
            self.wake()

    def wake(self) -> None:
        """Read the waiting bytes in the next turn, as for a readable socket."""
        if self._inbox:
            self.loop.call_soon(self._read, context=self.context)

    def arrive(self, item: bytes | Signal) -> None:
        """Receive bytes, FIN or RST from the network."""
        if self._lost:
            self._refuse_late(item)
        elif self._inbox or self.process.paused or not self._notices(item):
            self._inbox.append(item)
        else:
            self.context.run(self._receive, item)

    def _notices(self, item: bytes | Signal) -> bool:
        """Whether an arriving item is handled now; a socket that does not read notices only RST."""
        if item is RST and (self._buffer or self._closing):
            return True
        return self._reading and not self._closing

    def _refuse_late(self, item: bytes | Signal) -> None:
        """Answer data for a closed socket with RST, as TCP does."""
        if isinstance(item, bytes) and not self._reset_sent:
            self._send_signal(RST)

    def _read(self) -> None:
        if self._closing and RST in self._inbox:
            self._receive(RST)
        while self._inbox and self._reading and not self._closing:
            item = self._inbox.popleft()
            while isinstance(item, bytes) and self._inbox and isinstance(self._inbox[0], bytes):
                item += self._inbox.popleft()  # type: ignore[operator]
            self._receive(item)

    def _receive(self, item: bytes | Signal) -> None:
        if isinstance(item, bytes):
            self.incoming.consumed(len(item))
            self._call("data_received", self._feed, item)
        elif item is RST:
            self._break(self._reset_by_peer(), closing_signal=None)
        else:
            self._at_eof = True
            protocol: Any = self._protocol
            if not self._call("eof_received", protocol.eof_received):
                self.close()

    def _feed(self, data: bytes) -> None:
        protocol: Any = self._protocol
        if not isinstance(protocol, asyncio.BufferedProtocol):
            protocol.data_received(data)
            return
        while data:
            buffer = memoryview(protocol.get_buffer(len(data)))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            protocol.buffer_updated(size)
            data = data[size:]

    def _call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the protocol; if that raises, report it and abort the connection."""
        try:
            return method(*args)
        except Exception as error:
            message = f"protocol.{name}() failed"
            self.loop.call_exception_handler(
                {"message": message, "exception": error, "transport": self}
            )
            self._break(error)
            return True

    # Writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send bytes, as far as the window allows; the rest is buffered."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes-like, not {type(data).__name__}")
        if self._writes_eof:
            raise RuntimeError("cannot write after write_eof()")
        if self._lost or not data:
            return
        if RST in self._inbox:
            self._break(self._reset_by_peer(), closing_signal=None)
            return
        self._buffer += data
        self._send()
        self._maybe_pause_protocol()

    @property
    def waits_for_room(self) -> bool:
        """Whether bytes are buffered because the window is full."""
        return bool(self._buffer)

    def flush(self) -> None:
        """Send buffered bytes, after the window has opened."""
        if self._lost:
            return
        self._send()
        self._maybe_resume_protocol()
        if not self._buffer:
            self._flushed()

    def _send(self) -> None:
        room = self.outgoing.room
        if self._buffer and room > 0:
            data = bytes(self._buffer[:room])
            del self._buffer[:room]
            self.outgoing.send(data)

    def _flushed(self) -> None:
        if self._writes_eof:
            self.outgoing.signal(FIN)
        if self._closing:
            self._lose(None)

    def can_write_eof(self) -> bool:
        """Return True: TCP can close one direction alone."""
        return True

    def write_eof(self) -> None:
        """Close the sending direction after the buffered bytes; the peer may continue to send."""
        if self._writes_eof or self._closing:
            return
        self._writes_eof = True
        if not self._buffer:
            self.outgoing.signal(FIN)

    def get_write_buffer_size(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    # Ending

    def close(self) -> None:
        """Stop reading, send the buffered bytes, then end the stream."""
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._lose(None)

    def abort(self) -> None:
        """Close at once, without sending the buffered bytes."""
        self._break(None)

    def _break(self, error: Exception | None, closing_signal: Signal | None = FIN) -> None:
        if not self._lost:
            self._buffer.clear()
            self._lose(error, closing_signal)

    def _reset_by_peer(self) -> OSError:
        """Return the error for RST: after FIN, Linux reports a broken pipe."""
        if self._at_eof:
            return BrokenPipeError(errno.EPIPE, "Broken pipe")
        return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    def give_up_after(self, seconds: float) -> None:
        """Time the connection out after so many seconds of retransmissions."""
        if self._give_up_timer is None and not self._lost:
            self._give_up_timer = self.loop.call_later(seconds, self._give_up, context=NETWORK)

    def _give_up(self) -> None:
        self._break(TimeoutError(errno.ETIMEDOUT, "Connection timed out"), closing_signal=None)

    def _lose(self, error: Exception | None, closing_signal: Signal | None = FIN) -> None:
        self._shut(RST if closing_signal is FIN and self._unread() else closing_signal)
        self.loop.call_soon(self._connection_lost, error, context=self.context)

    def _unread(self) -> bool:
        return any(isinstance(item, bytes) for item in self._inbox)

    def _shut(self, closing_signal: Signal | None) -> None:
        """Close the socket, and send FIN or RST."""
        self._closing = self._lost = True
        self._inbox.clear()
        if closing_signal is RST or (closing_signal is FIN and not self._writes_eof):
            self._send_signal(closing_signal)

    def _send_signal(self, signal: Signal) -> None:
        self._reset_sent = signal is RST
        self.outgoing.signal(signal)

    def _connection_lost(self, error: Exception | None) -> None:
        self._forget()
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _forget(self) -> None:
        self.process.transports.pop(self, None)
        self.loop.network.ended(self)
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        if self.server is not None:
            self.server.detach(self)

    def killed(self) -> None:
        """Close the connection, because the process was killed."""
        if not self._lost:
            self._buffer.clear()
            self._shut(RST if self._unread() or self.loop.network.chance(0.5) else FIN)
        self._forget()
