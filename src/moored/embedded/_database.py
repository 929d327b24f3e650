"""The database of the server's URL, created if it is missing."""

from __future__ import annotations

__all__ = ["ensure_database"]


def ensure_database(url: str, name: str) -> None:
    """Create the database `name`, unless it exists; `url` is that of another database."""
    if name == "postgres":
        return
    import psycopg  # only if needed, because the import is slow
    from psycopg import sql

    with psycopg.connect(url, autocommit=True) as connection:
        query = "select 1 from pg_database where datname = %s"
        if connection.execute(query, [name]).fetchone() is None:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
