"""Cuts a stream of bytes into packets.

Nothing is copied as long as packets come whole; what is left of a chunk is kept, and never more of
it than one packet may have. A packet that is too large is refused when its header is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from ._codec import broken, malformed

__all__ = ["Frames"]

#: The first byte (kind and flags), the bytes, where the body begins in them, and where it ends.
Frame = tuple[int, bytes, int, int]


class Frames:
    """The cutter of one link.

    :param limit: the size of the largest packet that is taken, with its header.
    """

    __slots__ = ("_limit", "_need", "_rest")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest: bytearray | None = None
        # The size that the rest must have before it is worth looking at.
        self._need = 0

    def cut(self, data: bytes) -> Iterator[Frame]:
        """The packets that are whole now; it raises where a bad one begins."""
        rest = self._rest
        if rest is not None:
            rest += data
            if len(rest) < self._need:
                return
            data = bytes(rest)
            self._rest = None
        at, size = 0, len(data)
        while size - at >= 2:
            length, body = data[at + 1], at + 2
            if length >= 0x80:
                length, body = _long(data, body, length & 0x7F)
                if not body:
                    break
            end = body + length
            if end - at > self._limit:
                text = f"a packet of {end - at} bytes came, and {self._limit} are allowed"
                raise broken(0x95, text)
            if end > size:
                self._keep(data, at, end - size)
                return
            yield data[at], data, body, end
            at = end
        if at < size:
            self._keep(data, at, 1)

    def _keep(self, data: bytes, at: int, missing: int) -> None:
        self._rest = bytearray(data[at:])
        self._need = len(self._rest) + missing

    @property
    def kept(self) -> int:
        """How many bytes wait for the rest of their packet."""
        return len(self._rest) if self._rest is not None else 0


def _long(data: bytes, at: int, length: int) -> tuple[int, int]:
    """A length of more than one byte, and where it ends; 0 if that has not come yet."""
    for shift in (7, 14, 21):
        if at == len(data):
            return 0, 0
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            if not byte:
                raise malformed("a length is longer than it must be")
            return length, at
    raise malformed("a length of more than four bytes")
