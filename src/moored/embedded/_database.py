"""The database that the caller named, made when it is missing."""

from __future__ import annotations

__all__ = ["ensure_database"]


def ensure_database(url: str, name: str) -> None:
    """Make the database `name`, unless the server has it; `url` leads to another one."""
    if name == "postgres":
        return
    import psycopg  # here, because most servers need no other database, and it takes its time
    from psycopg import sql

    with psycopg.connect(url, autocommit=True) as connection:
        query = "select 1 from pg_database where datname = %s"
        if connection.execute(query, [name]).fetchone() is None:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
