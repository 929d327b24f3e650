"""The listening sockets, bound before anything else starts; errors name the holder of the port."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from moored.kernel import program_of

from ._connections import BACKLOG
from ._errors import CannotListen

__all__ = ["holder_of", "listen", "listening_inodes"]


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of the host, on one port; raises `CannotListen`.

    They stay open while the service runs, so that no client is refused while HTTP restarts.
    """
    taken: list[socket.socket] = []
    failures: list[OSError] = []
    for family, address in _addresses(host, port):
        wanted = port or (taken[0].getsockname()[1] if taken else 0)
        try:
            taken.append(_bound(family, address, wanted))
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


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the previous run in TIME_WAIT must not block the port.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        one.listen(BACKLOG)
        one.setblocking(False)
    except BaseException:
        one.close()
        raise
    return one


def _why(host: str, port: int, error: OSError) -> str:
    what = f"cannot listen on [{host}]:{port}" if ":" in host else f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        by = f" by {holder}" if (holder := holder_of(port)) else ""
        return f"{what}: the port is in use{by}. Stop it, or choose another with --port."
    if error.errno == errno.EACCES:
        return f"{what}: this user may not bind port {port}. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine does not have this address. Choose another with --host."
    return f"{what}: {error.strerror}. Choose another address with --host and --port."


def holder_of(port: int) -> str | None:
    """Return the process that listens on a port: "pid 812 (moored serve)"; None if unknown."""
    if sys.platform != "linux":
        return None
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            inodes |= listening_inodes(Path(table).read_text(), port)
        except OSError:
            pass  # a kernel without IPv6
    pid = _owner({f"socket:[{inode}]" for inode in inodes}) if inodes else None
    if pid is None:
        return None  # a process of another user, which only root can inspect
    try:
        program = program_of(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({program})" if program else f"pid {pid}"


def listening_inodes(table: str, port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port, from the text of /proc/net/tcp."""
    listening = "0A"
    found = set()
    for line in table.splitlines()[1:]:
        columns = line.split()
        if columns[3] == listening and int(columns[1].rpartition(":")[2], 16) == port:
            found.add(columns[9])
    return found


def _owner(links: Iterable[str]) -> int | None:
    wanted = set(links)
    # The lowest pid first: a parent is named before the children that share its socket.
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # the process has ended, or belongs to another user
        for descriptor in descriptors:
            try:
                if os.readlink(descriptor) in wanted:
                    return pid
            except OSError:
                continue  # closed meanwhile
    return None
