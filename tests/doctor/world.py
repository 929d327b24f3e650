"""A server that tests break and repair, with a healthy database before each of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psycopg
from psycopg import sql

from moored.embedded import SyncEmbeddedPostgres

__all__ = ["OPTIONS", "PASSWORD", "World"]

PASSWORD = "a-secret-of-app"
#: Limits that are quickly reached.
OPTIONS = {
    "fsync": "off",
    "max_prepared_transactions": "2",
    "max_replication_slots": "3",
    "max_wal_senders": "3",
    "max_wal_size": "32MB",
    "min_wal_size": "32MB",
}


class World:
    """The database `shop`, whose user `app` has what Moored needs, and no more."""

    def __init__(self, server: SyncEmbeddedPostgres) -> None:
        self.server = server
        self.held = ExitStack()
        self._restarted = False
        self._shop: psycopg.Connection[Any] | None = None
        self.admin = self.connect(server.url)

    @property
    def url(self) -> str:
        """The URL of the user."""
        return self.url_with()

    def url_with(self, **changes: Any) -> str:
        """Return the URL of the user, with other parts."""
        parts = {
            "user": "app",
            "password": PASSWORD,
            "host": self.server.host,
            "port": self.server.port,
            "dbname": "shop",
            **changes,
        }
        return "postgresql://{user}:{password}@{host}:{port}/{dbname}".format_map(parts)

    def connect(self, url: str, **options: Any) -> psycopg.Connection[Any]:
        """Open a connection that lasts as long as the test."""
        conn = psycopg.connect(url, autocommit=True, **options)
        self.held.callback(conn.close)
        return conn

    def own(self, *statements: str) -> psycopg.Connection[Any]:
        """Run statements as the user, on a connection that stays open."""
        conn = self.connect(self.url)
        for statement in statements:
            conn.execute(statement.encode())
        return conn

    def run(self, *statements: str) -> None:
        """Run statements in the database as its administrator."""
        if self._shop is None or self._shop.closed:
            self._shop = self.connect(self.server.url_of("shop"))
        for statement in statements:
            self._shop.execute(statement.encode())

    def configure(self, **settings: str) -> None:
        """Change settings of the server."""
        for name, value in settings.items():
            change = sql.SQL("alter system set {} = {}").format(sql.Identifier(name), value)
            self.admin.execute(change)
        self.admin.execute("select pg_reload_conf()")

    def restart(self) -> None:
        """Restart the server; connections are lost."""
        self.held.close()
        self.server.restart()
        self._restarted = True
        self.admin = self.connect(self.server.url)

    def write_wal(self, segments: int) -> None:
        """Fill some segments of the WAL."""
        for _ in range(segments):
            self.run("select pg_switch_wal()", "select pg_logical_emit_message(false, '', '')")

    def make_healthy(self) -> None:
        """Create the database and its user."""
        self.admin.execute(f"create role app login replication password '{PASSWORD}'".encode())
        self.admin.execute("create database shop strategy file_copy")
        self.run("grant create on database shop to app", "grant create on schema public to app")
        self.own("create table orders (id int primary key)")

    def clean(self) -> None:
        """Remove everything that a test has left."""
        self.held.close()
        self.admin = self.connect(self.server.url)
        self.admin.execute("alter system reset all")
        self.restart() if self._restarted else self.admin.execute("select pg_reload_conf()")
        self._restarted = False
        for (gid,) in self.admin.execute("select gid from pg_prepared_xacts").fetchall():
            self.run(f"rollback prepared '{gid}'")
        self.admin.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        self.admin.execute("drop database if exists missing")
        self.admin.execute("drop database shop with (force)")
        self.admin.execute("drop role app")
