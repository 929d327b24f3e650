"""The sockets to listen on, taken before anything else starts, and who has them if we cannot."""

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
    """A listening socket for each address of the host, all on one port; raises `CannotListen`.

    They stay open while the service runs, so that a restart of its HTTP part refuses nobody.
    """
    taken: list[socket.socket] = []
    failures: list[OSError] = []
    for family, address in _addresses(host, port):
        wanted = port or (taken[0].getsockname()[1] if taken else 0)
        try:
            taken.append(_bound(family, address, wanted))
        except OSError as error:
            failures.append(error)
    # A name may stand for addresses of which the machine has only some (localhost without IPv6).
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
            f"cannot listen on {host}: the name is not known ({error.strerror}). "
            "Choose an address of this machine with --host."
        ) from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the last run that still linger must not keep the port.
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
        return f"{what}: this user may not take port {port}. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine has no such address. Choose one of its own with --host."
    return f"{what}: {error.strerror}. Choose another address with --host and --port."


def holder_of(port: int) -> str | None:
    """Who listens on a port, as in "pid 812 (moored serve)"; None where it cannot be found."""
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
        return None  # another user's process, which only root can look into
    try:
        program = program_of(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({program})" if program else f"pid {pid}"


def listening_inodes(table: str, port: int) -> set[str]:
    """The inodes of the sockets that listen on a port, out of the text of /proc/net/tcp."""
    listening = "0A"
    found = set()
    for line in table.splitlines()[1:]:
        columns = line.split()
        if columns[3] == listening and int(columns[1].rpartition(":")[2], 16) == port:
            found.add(columns[9])
    return found


def _owner(links: Iterable[str]) -> int | None:
    wanted = set(links)
    # The lowest number: a parent that has handed its socket to children comes before them.
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue  # it has ended, or belongs to another user
        for descriptor in descriptors:
            try:
                if os.readlink(descriptor) in wanted:
                    return pid
            except OSError:
                continue  # closed meanwhile
    return None
