"""The replication protocol around pgoutput: data, keepalives, and the answers of a standby."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .._errors import DecodeError
from .._lsn import Lsn

__all__ = ["KEEPALIVE", "PrimaryKeepalive", "read_keepalive", "status_update"]

#: The first byte of a keepalive.
KEEPALIVE = ord("k")
#: Seconds from 1970 to 2000, where PostgreSQL's time begins.
_EPOCH = 946_684_800

_keepalive = struct.Struct("!cQqB")
_status = struct.Struct("!cQQQqB")


class PrimaryKeepalive(NamedTuple):
    """A sign of life of the server."""

    #: How far it has sent: everything before this place.
    end: Lsn
    #: Whether it wants an answer now.
    reply: bool


def read_keepalive(data: bytes) -> PrimaryKeepalive:
    """The keepalive in this message."""
    try:
        _, end, _, reply = _keepalive.unpack(data)
    except struct.error:
        raise DecodeError(f"a keepalive has {len(data)} bytes instead of 18") from None
    return PrimaryKeepalive(Lsn(end), bool(reply))


def status_update(received: int, flushed: int, wall: float, *, reply: bool = False) -> bytes:
    """What a standby tells the server: the last byte that it received, and the last that is safe.

    The protocol wants the places after them, hence each + 1; applied is the same as flushed.
    """
    microseconds = int((wall - _EPOCH) * 1_000_000)
    return _status.pack(b"r", received + 1, flushed + 1, flushed + 1, microseconds, reply)
