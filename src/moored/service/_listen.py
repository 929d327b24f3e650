"""The listening sockets, bound before anything else starts."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from glob import iglob
from itertools import takewhile
from pathlib import Path

from ._connections import BACKLOG
from ._errors import CannotListen

__all__ = ["listen"]


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of the host, on one port; raises `CannotListen`.

    They stay open while the service runs, so that no client is refused while HTTP restarts.
    """
    taken: list[socket.socket] = []
    failures: list[OSError] = []
    for family, address in _addresses(host, port):
        wanted = port or (taken[0].getsockname()[1] if taken else 0)
        try:
            # Without dual stack, so that "localhost" gets a socket for each of its addresses.
            one = socket.create_server((address, wanted), family=family, backlog=BACKLOG)
            one.setblocking(False)
            taken.append(one)
        except OSError as error:
            failures.append(error)
    # A name may have addresses that this machine does not (localhost without IPv6).
    if failures and (not taken or any(e.errno != errno.EADDRNOTAVAIL for e in failures)):
        for one in taken:
            one.close()
        raise CannotListen(_why(host, port, failures[0])) from failures[0]
    return taken


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host}: the name cannot be resolved ({error.strerror}). "
            "Choose an address of this machine with --host."
        ) from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _why(host: str, port: int, error: OSError) -> str:
    what = f"cannot listen on [{host}]:{port}" if ":" in host else f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        who = _listener(port)
        stop = "Stop it" if who else "Stop the program that listens there (`ss -ltnp` names it)"
        return f"{what}: the port is in use{who}. {stop}, or choose another with --port."
    if error.errno == errno.EACCES:
        return f"{what}: this user may not bind port {port}. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine does not have this address. Choose another with --host."
    return f"{what}: {error.strerror}. Choose another address with --host and --port."


def _listener(port: int) -> str:
    """Return which process listens on a port, if this user may know it."""
    with suppress(OSError):  # without /proc
        tables = [Path(each).read_text() for each in iglob("/proc/net/tcp*")]
        rows = [line.split() for line in "".join(tables).splitlines()]
        found = {f"socket:[{r[9]}]" for r in rows if r[3] == "0A" and r[1][-5:] == f":{port:04X}"}
        for path in iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # ended meanwhile, or of another user
                if os.readlink(path) in found:
                    command = Path(path).parents[1].joinpath("cmdline").read_bytes()
                    words = command.decode(errors="replace").split("\0")
                    shown = " ".join(takewhile(_is_no_option, words)).strip()
                    return f" by pid {path.split('/')[2]} ({shown})"
    return ""


def _is_no_option(word: str) -> bool:
    """Whether a word of a command may be shown: options and URLs may contain secrets."""
    return word == "-m" or not (word.startswith("-") or "://" in word)
