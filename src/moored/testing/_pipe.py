"""One direction of a simulated TCP connection, with its bytes in flight."""

from __future__ import annotations

from collections import deque
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._network import Network
    from ._paths import Path
    from ._transport import SimTransport

__all__ = ["FIN", "NETWORK", "RST", "Pipe", "Signal"]


class Signal:
    """A TCP flag in flight."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


FIN: Final = Signal("FIN")
RST: Final = Signal("RST")

# The context of the network's own timers: they belong to no host, and run while hosts are paused.
NETWORK = Context()


@dataclass(slots=True, eq=False, repr=False)
class Pipe:
    """Delivers the bytes of one transport to another, along one path of the network.

    `outstanding` counts the bytes that the receiver has not read. They fill the window; a full
    window makes the sender buffer, which is the back-pressure. Bytes that a black hole drops stay
    outstanding for ever.
    """

    network: Network
    path: Path
    sender: SimTransport
    receiver: SimTransport
    serial: int = field(init=False)
    outstanding: int = 0
    broken: bool = False
    stalled: int = 0
    _in_flight: deque[bytes | Signal] = field(default_factory=deque)
    _last: float = 0.0

    def __post_init__(self) -> None:
        self.serial = self.network.loop.number()

    @property
    def room(self) -> int:
        """The bytes that the sender may send now."""
        return self.network.window - self.outstanding

    def send(self, data: bytes) -> None:
        """Send bytes, split at random."""
        self.outstanding += len(data)
        for piece in self.network.pieces(data):
            self._dispatch(piece)

    def signal(self, signal: Signal) -> None:
        """Send FIN after the bytes in flight, or RST, which may overtake them."""
        if signal is RST and self.network.chance(0.5):
            self._in_flight = deque(RST for _ in self._in_flight)
        self._dispatch(signal)

    def _dispatch(self, item: bytes | Signal) -> None:
        in_flight, network = self._in_flight, self.network
        if (
            in_flight
            and isinstance(item, bytes)
            and isinstance(in_flight[-1], bytes)
            and network.chance(network.coalesce)
        ):
            in_flight[-1] += item
            return
        in_flight.append(item)
        self._schedule()

    def _schedule(self) -> None:
        loop = self.network.loop
        # A later piece never overtakes an earlier one.
        self._last = max(self._last, loop.time() + self.network.delay(self.path))
        loop.call_at(self._last, self._arrive, context=NETWORK)

    def _arrive(self) -> None:
        item = self._in_flight.popleft()
        if self.broken or self.path.blackhole:
            self._lose(item)
        elif self.path.paused or self.stalled:
            self._in_flight.appendleft(item)
            self.stalled += 1
        else:
            self._deliver(item)

    def _deliver(self, item: bytes | Signal) -> None:
        self._note("", item)
        self.receiver.arrive(item)

    def _lose(self, item: bytes | Signal) -> None:
        self._note("lost ", item)
        # TCP would retransmit, and time out in the end.
        self.sender.give_up_after(self.network.retransmit_for)
        self.broken = True

    def _note(self, prefix: str, item: bytes | Signal) -> None:
        size = len(item) if isinstance(item, bytes) else 0
        loop = self.network.loop
        loop.count(self.serial, size)
        if loop.trace is not None:
            what = f"-> {self.receiver.address} {prefix}{item!r:.60}"
            loop.trace.add(loop.time(), self.sender.address, what)

    def consumed(self, size: int) -> None:
        """Open the window by the bytes that the receiver has read."""
        self.outstanding -= size
        if self.sender.waits_for_room:
            self.network.loop.call_soon(self.sender.flush, context=self.sender.context)

    def resume(self) -> None:
        """Deliver the items that a paused path held back."""
        count, self.stalled = self.stalled, 0
        for _ in range(count):
            self._schedule()
