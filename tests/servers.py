"""Servers for tests: installed ones, by the list in tools/servers.py, and empty databases."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from tools import servers

from moored.embedded import SyncEmbeddedPostgres
from moored.embedded._ports import choose_port

__all__ = ["empty_database", "free_port", "require_server"]

_numbers = itertools.count(1)


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


@contextmanager
def empty_database(server: SyncEmbeddedPostgres) -> Iterator[str]:
    """Create a database, yield its URL, and drop it with whatever is still connected to it."""
    plain = f"test_{os.getpid()}_{next(_numbers)}"
    name = sql.Identifier(plain)
    with psycopg.connect(server.url, autocommit=True) as connection:
        # Copying the files costs a tenth of writing their contents to the log.
        connection.execute(sql.SQL("create database {} strategy file_copy").format(name))
        yield server.url_of(plain)
        connection.execute(sql.SQL("drop database {} with (force)").format(name))
