"""The installed servers that tests need, found by the one list in tools/servers.py."""

from __future__ import annotations

import os

import pytest
from tools import servers

from moored.embedded._ports import choose_port

__all__ = ["free_port", "require_server"]


def free_port() -> int:
    """A port for a test's server: never one that the system may give to an outgoing connection."""
    return choose_port("127.0.0.1")


def require_server(name: str) -> str:
    """The path of a server's binary; without it the test is skipped, and in CI it fails."""
    found = servers.find(name)
    if found is not None:
        return found
    package = next(server.package for server in servers.SERVERS if server.name == name)
    reason = f"{name} is not installed (as root: apt-get install {package})"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
