"""The messages of the streaming replication protocol: keepalives and status updates."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .._errors import DecodeError
from .._lsn import Lsn

__all__ = ["KEEPALIVE", "PrimaryKeepalive", "read_keepalive", "status_update"]

#: The first byte of a keepalive.
KEEPALIVE = ord("k")
#: Seconds from 1970 to 2000, the epoch of PostgreSQL.
_EPOCH = 946_684_800

_keepalive = struct.Struct("!cQqB")
_status = struct.Struct("!cQQQqB")


class PrimaryKeepalive(NamedTuple):
    """A keepalive message of the server."""

    #: The end of the WAL that the server has sent.
    end: Lsn
    #: Whether the server requests a status update now.
    reply: bool


def read_keepalive(data: bytes) -> PrimaryKeepalive:
    """Parse a keepalive message."""
    try:
        _, end, _, reply = _keepalive.unpack(data)
    except struct.error:
        raise DecodeError(f"a keepalive has {len(data)} bytes instead of 18") from None
    return PrimaryKeepalive(Lsn(end), bool(reply))


def status_update(received: int, flushed: int, wall: float, *, reply: bool = False) -> bytes:
    """Return a standby status update for the last received byte and the last safe byte.

    The protocol requires the positions after them, hence each + 1; applied is the same as flushed.
    """
    microseconds = int((wall - _EPOCH) * 1_000_000)
    return _status.pack(b"r", received + 1, flushed + 1, flushed + 1, microseconds, reply)
