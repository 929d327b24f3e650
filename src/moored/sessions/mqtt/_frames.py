"""Splits a stream of bytes into packets.

Complete packets are not copied; the rest of a chunk is kept, and is never longer than one packet
may be. Of a PUBLISH that is too large only the topic (up to 64 KiB) and the packet id are kept, and
the rest is dropped as it arrives; any other packet that is too large is refused by its header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._codec import broken, read_number

__all__ = ["OVERSIZED", "PacketFrames"]

#: The first byte (kind and flags), the bytes, where the body begins in them, and where it ends.
Frame = tuple[int, bytes, int, int]
#: Added to the first byte of a PUBLISH that is too large: its end may be beyond the bytes.
OVERSIZED = 0x100


@dataclass(slots=True, eq=False, repr=False)
class PacketFrames:
    """The packet splitter of one link."""

    # The size of the largest accepted packet, with its header.
    _limit: int
    _rest: bytearray | None = None
    # The size of the rest at which the next packet may be complete.
    _need: int = 0
    # The number of bytes to drop, of a PUBLISH that is too large.
    _skip: int = 0

    def cut(self, data: bytes) -> Iterator[Frame]:
        """Yield the packets that are complete now; raises `ProtocolError` at an invalid one."""
        rest = self._rest
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        elif rest is not None:
            rest += data
            if len(rest) < self._need:
                return
            data = bytes(rest)
            self._rest = None
        at, size = 0, len(data)
        while size - at >= 2:
            length, body = data[at + 1], at + 2
            if length >= 0x80:
                if size - at < 5 and min(data[at + 1 : size]) >= 0x80:
                    break  # the length is incomplete
                length, body = read_number(data, at + 1, size)
            end = body + length
            if end - at > self._limit:
                if data[at] & 0xF0 != 0x30:
                    text = f"a packet of {end - at} bytes; at most {self._limit} are allowed"
                    raise broken(0x95, text)
                missing = _missing(data, body, end)
                if missing > 0:
                    self._keep(data, at, missing)
                    return
                self._skip = max(0, end - size)
                yield data[at] | OVERSIZED, data, body, end
            elif end > size:
                self._keep(data, at, end - size)
                return
            else:
                yield data[at], data, body, end
            at = end
        if at < size:
            self._keep(data, at, 1)

    def _keep(self, data: bytes, at: int, missing: int) -> None:
        self._rest = bytearray(data[at:])
        self._need = len(self._rest) + missing


def _missing(data: bytes, body: int, end: int) -> int:
    """Return how many bytes are missing to read the topic and the packet id of a PUBLISH."""
    size = len(data) - body
    need = 2
    if size >= 2:
        need += (data[body] << 8 | data[body + 1]) + 2
    return min(need, end - body) - size
