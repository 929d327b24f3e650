"""One direction of a simulated TCP connection: bytes in flight, in order, or lost for good."""

from __future__ import annotations

from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._network import Network
    from ._paths import Path
    from ._transport import SimTransport

__all__ = ["FIN", "NETWORK", "RST", "Pipe", "Signal"]


class Signal:
    """Something on the wire that is not data."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


FIN: Final = Signal("FIN")
RST: Final = Signal("RST")

# What the network itself does belongs to no host, so that it goes on while a host is paused.
NETWORK = Context()


class Pipe:
    """Carries what one transport sends to another, along one path of the network.

    `outstanding` counts the bytes that the receiver has not read: they fill the window, and a full
    window makes the sender buffer, which is all there is to back-pressure. Bytes that a black hole
    swallows stay outstanding for ever.
    """

    __slots__ = (
        "_flying",
        "_last",
        "broken",
        "network",
        "outstanding",
        "path",
        "receiver",
        "sender",
        "serial",
        "stalled",
    )

    def __init__(
        self, network: Network, path: Path, sender: SimTransport, receiver: SimTransport
    ) -> None:
        self.network = network
        self.path = path
        self.sender = sender
        self.receiver = receiver
        self.serial = network.loop.number()
        self.outstanding = 0
        self.broken = False
        self.stalled = 0
        self._flying: deque[bytes | Signal] = deque()
        self._last = 0.0

    @property
    def room(self) -> int:
        """How many bytes the sender may put on the wire now."""
        return self.network.window - self.outstanding

    def send(self, data: bytes) -> None:
        """Put bytes on the wire, in as many pieces as the seed likes."""
        self.outstanding += len(data)
        for piece in self.network.pieces(data):
            self._dispatch(piece)

    def signal(self, signal: Signal) -> None:
        """End the stream: FIN after what is in flight; RST may overtake it, if the seed likes."""
        if signal is RST and self.network.chance(0.5):
            self._flying = deque(RST for _ in self._flying)
        self._dispatch(signal)

    def _dispatch(self, item: bytes | Signal) -> None:
        flying, network = self._flying, self.network
        if (
            flying
            and isinstance(item, bytes)
            and isinstance(flying[-1], bytes)
            and network.chance(network.coalesce)
        ):
            flying[-1] += item
            return
        # A later piece never overtakes an earlier one.
        self._last = max(self._last, network.loop.time() + network.delay(self.path))
        flying.append(item)
        network.loop.call_at(self._last, self._arrive, context=NETWORK)

    def _arrive(self) -> None:
        item = self._flying.popleft()
        if self.broken or self.path.blackhole:
            self._lose(item)
        elif self.path.paused or self.stalled:
            self._flying.appendleft(item)
            self.stalled += 1
        else:
            self._deliver(item)

    def _deliver(self, item: bytes | Signal) -> None:
        self._note("", item)
        self.receiver.arrive(item)

    def _lose(self, item: bytes | Signal) -> None:
        self._note("lost ", item)
        # TCP would send it again and again, and give up in the end.
        self.sender.give_up_after(self.network.retransmit_for)
        self.broken = True

    def _note(self, fate: str, item: bytes | Signal) -> None:
        size = len(item) if isinstance(item, bytes) else 0
        loop = self.network.loop
        loop.count(self.serial, size)
        if loop.trace is not None:
            what = f"-> {self.receiver.address} {fate}{item!r:.60}"
            loop.trace.add(loop.time(), self.sender.address, what)

    def consumed(self, size: int) -> None:
        """The receiver has read this much: the window opens."""
        self.outstanding -= size
        if self.sender.waits_for_room:
            self.network.loop.call_soon(self.sender.flush, context=self.sender.context)

    def resume(self) -> None:
        """Send on what a paused path held back."""
        count, self.stalled = self.stalled, 0
        for _ in range(count):
            now = self.network.loop.time()
            self._last = max(self._last, now + self.network.delay(self.path))
            self.network.loop.call_at(self._last, self._arrive, context=NETWORK)

    def __repr__(self) -> str:
        state = " broken" if self.broken else " stalled" if self.stalled else ""
        return f"<Pipe {self.sender.address} -> {self.receiver.address}{state}>"
