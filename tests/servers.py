"""Servers for tests: installed programs listed in tools/servers.py, and empty databases."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import psycopg
import pytest
from psycopg import sql
from tools import servers

from moored.embedded import SyncEmbeddedPostgres
from moored.embedded._ports import choose_port

__all__ = ["Databases", "empty_database", "free_port", "give", "require_server"]

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
    name = _create(server)
    yield server.url_of(name)
    _drop(server, name)


class Databases:
    """Empty databases of a server: one that a test has used is emptied, and used again.

    This takes a third of the time of a new one, and there are hundreds of such tests.
    """

    _of: ClassVar[WeakKeyDictionary[SyncEmbeddedPostgres, Databases]] = WeakKeyDictionary()

    @classmethod
    def of(cls, server: SyncEmbeddedPostgres) -> Databases:
        """Return the databases of a server."""
        return cls._of.setdefault(server, cls(weakref.proxy(server)))

    def __init__(self, server: SyncEmbeddedPostgres) -> None:
        self._server = server
        self._spare: list[str] = []
        self._nothing: object = None

    @contextmanager
    def empty(self) -> Iterator[str]:
        """Yield the URL of an empty database for one test."""
        name = self._spare.pop() if self._spare else _create(self._server)
        url = self._server.url_of(name)
        if self._nothing is None:
            with psycopg.connect(url, autocommit=True) as connection:
                self._nothing = connection.execute(_CONTENTS).fetchone()
        yield url
        if self._emptied(url):
            self._spare.append(name)
        else:
            _drop(self._server, name)

    def _emptied(self, url: str) -> bool:
        """Empty a database; not if it has settings, for example, or privileges, or extensions."""
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("set lock_timeout = '10s'")
                connection.execute(_EMPTY)
                return connection.execute(_CONTENTS).fetchone() == self._nothing
        except psycopg.Error:
            return False


def _create(server: SyncEmbeddedPostgres) -> str:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    # Copying the files takes a tenth of the time of the default, which writes them to the WAL.
    create = sql.SQL("create database {} strategy file_copy").format(sql.Identifier(name))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(create)
    return name


def _drop(server: SyncEmbeddedPostgres, name: str) -> None:
    drop = sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(drop)


#: End the other connections of this database, and drop what tests usually create.
_EMPTY = """
do $$
declare
    each record;
begin
    perform pg_terminate_backend(pid, 30000) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid();
    perform pg_drop_replication_slot(slot_name) from pg_replication_slots
        where database = current_database();
    for each in select pubname as name from pg_publication loop
        execute format('drop publication %I', each.name);
    end loop;
    for each in select evtname as name from pg_event_trigger loop
        execute format('drop event trigger %I', each.name);
    end loop;
    for each in select nspname as name from pg_namespace
            where nspname !~ '^pg_' and nspname <> 'information_schema' loop
        execute format('drop schema %I cascade', each.name);
    end loop;
    create schema public authorization pg_database_owner;
    grant usage on schema public to public;
end
$$
"""

#: What a database has, as numbers of entries in catalogs; the same for every empty one.
_CONTENTS = """
select
    (select count(*) from pg_class), (select count(*) from pg_proc),
    (select count(*) from pg_type), (select count(*) from pg_namespace),
    (select count(*) from pg_extension), (select count(*) from pg_cast),
    (select count(*) from pg_language), (select count(*) from pg_foreign_data_wrapper),
    (select count(*) from pg_largeobject_metadata), (select count(*) from pg_default_acl),
    (select count(*) from pg_replication_slots where database = current_database()),
    (select count(*) from pg_subscription), (select count(*) from pg_prepared_xacts),
    (select count(*) from pg_db_role_setting s where s.setdatabase = d.oid),
    datacl::text, datconnlimit, datallowconn, datdba
from pg_database d where datname = current_database()
"""
