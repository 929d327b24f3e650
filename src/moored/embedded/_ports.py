"""The choice of a free port."""

from __future__ import annotations

import random
import socket

from ._options import HOST

__all__ = ["choose_port"]

# Below the range of ephemeral ports (Linux from 32768, others from 49152), so that no outgoing
# connection takes the port of a server that is restarting.
_FIRST, _LAST = 15000, 32767
_chance = random.SystemRandom()


def choose_port() -> int:
    """Return a port that is free now; another program may bind it before the caller does."""
    while True:
        port = _chance.randint(_FIRST, _LAST)
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return port
