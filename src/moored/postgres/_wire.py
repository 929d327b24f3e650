"""The replication protocol around pgoutput: data, keepalives, and the answers of a standby."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ._errors import ProtocolError
from ._lsn import Lsn

__all__ = ["DATA", "KEEPALIVE", "Keepalive", "read_keepalive", "status_update", "walk_to"]

#: The first bytes of what a server sends.
DATA, KEEPALIVE = b"wk"
#: Seconds from 1970 to 2000, where PostgreSQL's time begins.
_EPOCH = 946_684_800

_keepalive = struct.Struct("!cQqB")
_status = struct.Struct("!cQQQqB")
_data = struct.Struct("!cQQq")


class Keepalive(NamedTuple):
    """A sign of life of the server."""

    #: How far it has sent: everything before this place.
    end: Lsn
    #: Whether it wants an answer now.
    reply: bool


def read_keepalive(data: bytes) -> Keepalive:
    """The keepalive in this message."""
    try:
        _, end, _, reply = _keepalive.unpack(data)
    except struct.error:
        raise ProtocolError(f"a keepalive has {len(data)} bytes instead of 18") from None
    return Keepalive(Lsn(end), bool(reply))


def walk_to(data: bytes) -> int:
    """Where in the log the data of this message begins."""
    try:
        return int(_data.unpack_from(data)[1])
    except struct.error:
        raise ProtocolError("a message of the stream ends within its header") from None


def status_update(received: int, flushed: int, wall: float, *, reply: bool = False) -> bytes:
    """What a standby tells the server: the last byte that it received, and the last that is safe.

    The protocol wants the places after them, hence each + 1; applied is the same as flushed.
    """
    microseconds = int((wall - _EPOCH) * 1_000_000)
    return _status.pack(b"r", received + 1, flushed + 1, flushed + 1, microseconds, reply)
