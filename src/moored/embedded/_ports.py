"""The choice of a free port."""

from __future__ import annotations

import random
import socket

__all__ = ["choose_port"]

# Below the range of ephemeral ports (Linux from 32768, others from 49152), so that no outgoing
# connection takes the port of a server that is restarting.
_FIRST, _LAST = 15000, 32767
_chance = random.SystemRandom()


def choose_port(host: str) -> int:
    """Return a port that is free now; another program may bind it before the caller does."""
    while True:
        port = _chance.randint(_FIRST, _LAST)
        if _free(host, port):
            return port


def _free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True
