"""Servers for tests: installed programs listed in tools/servers.py, and empty databases."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from tools import servers

from moored.embedded import SyncEmbeddedPostgres
from moored.embedded._ports import choose_port

__all__ = ["empty_database", "free_port", "give", "require_server"]

_numbers = itertools.count(1)


def free_port() -> int:
    """Return a free port outside the range of outgoing connections."""
    return choose_port()


def give(directory: Path, like: Path) -> None:
    """Give a directory and its contents to the owner of another; only root needs to, and may."""
    if os.geteuid() == 0:
        owner = like.stat()
        for path in (directory, *directory.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def require_server(name: str) -> str:
    """Return the path of a server's binary; if it is missing, skip the test, or in CI fail it."""
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
    """Create a database, yield its URL, and drop it with its remaining connections."""
    plain = f"test_{os.getpid()}_{next(_numbers)}"
    name = sql.Identifier(plain)
    with psycopg.connect(server.url, autocommit=True) as connection:
        # Copying the files takes a tenth of the time of the default, which writes them to the WAL.
        connection.execute(sql.SQL("create database {} strategy file_copy").format(name))
        yield server.url_of(plain)
        connection.execute(sql.SQL("drop database {} with (force)").format(name))
