"""A free port of this machine."""

from __future__ import annotations

import random
import socket

__all__ = ["choose_port"]

# Below the range from which kernels give ports to clients (Linux 32768, others 49152), so that the
# port of a server that is restarting is not taken by somebody's outgoing connection.
_FIRST, _LAST = 15000, 32767
_chance = random.SystemRandom()


def choose_port(host: str) -> int:
    """A port that nobody listens on just now; who binds it must be ready to lose a race."""
    while True:
        port = _chance.randint(_FIRST, _LAST)
        if _free(host, port):
            return port


def _free(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError:
            return False
    return True
