"""Host names for tests, and whether this machine has IPv6."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

__all__ = ["NAME", "Name", "by_name", "name_service", "require_ipv6"]

#: No name service knows it: what ends with .test never exists.
NAME = "db.moored.test"

Name = Callable[..., None]


def require_ipv6() -> None:
    """Skip the test where the kernel has no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip(f"this kernel has no IPv6 loopback: {error}")


def name_service(monkeypatch: pytest.MonkeyPatch) -> Name:
    """Return a function that sets the addresses of `NAME`, in their order."""
    known: list[str] = []
    ask = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        if host != NAME:
            return ask(host, port, *rest, **more)
        return [found for each in known for found in ask(each, port, *rest, **more)]

    def name(*addresses: str) -> None:
        known[:] = addresses

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return name


def by_name(url: str, name: str = NAME) -> str:
    """The same URL, with a name for its host."""
    host = str(conninfo_to_dict(url)["host"])
    assert url.count(f"@{host}:") == 1
    return url.replace(f"@{host}:", f"@{name}:")
