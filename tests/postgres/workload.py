"""Random transactions of several concurrent connections: large, small, with savepoints."""

from __future__ import annotations

import random
from typing import Any

import psycopg
from psycopg import sql

__all__ = ["Workload"]


class Workload:
    """Each connection has rows and a table of its own, so that none waits for another."""

    def __init__(self, url: str, seed: int, writers: int = 3) -> None:
        self._random = random.Random(seed)
        self._connections = [psycopg.connect(url) for _ in range(writers)]
        self._savepoints: list[list[str]] = [[] for _ in range(writers)]
        self._columns = [0] * writers
        self._number = 0
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table shared (id int primary key, writer int, body text)")
            for writer in range(writers):
                connection.execute(_named("create table {} (id int primary key)", writer))
                connection.execute(_named("alter table {} replica identity full", writer))

    def run(self, steps: int) -> None:
        """So many steps, each of a writer drawn by chance; then all come to an end."""
        for _ in range(steps):
            self._step(self._random.randrange(len(self._connections)))
        for writer in range(len(self._connections)):
            self._end(writer)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def _step(self, writer: int) -> None:
        actions = {
            self._insert: 8, self._update: 3, self._delete: 2, self._own: 3, self._widen: 1,
            self._emit: 1, self._savepoint: 4, self._back: 3, self._release: 1, self._end: 3,
        }  # fmt: skip
        (action,) = self._random.choices(list(actions), list(actions.values()))
        action(writer)

    def _do(self, writer: int, query: Any, *values: Any) -> None:
        self._connections[writer].execute(query, values or None)

    def _insert(self, writer: int) -> None:
        first, count = self._number + 1, self._random.choice([1, 3, 60])
        self._number += count
        self._do(
            writer,
            "insert into shared select n, %s, repeat(md5(n::text), 40) "
            "from generate_series(%s::int, %s::int) n",
            writer, first, first + count - 1,
        )  # fmt: skip

    def _update(self, writer: int) -> None:
        self._do(writer, "update shared set body = body || '!' where writer = %s", writer)

    def _delete(self, writer: int) -> None:
        self._do(writer, "delete from shared where writer = %s and id %% 3 = 0", writer)

    def _own(self, writer: int) -> None:
        self._number += 1
        self._do(writer, _named("insert into {} (id) values (%s)", writer), self._number)

    def _widen(self, writer: int) -> None:
        """The table gets a column, which goes again if this is rolled back."""
        self._columns[writer] += 1
        column = sql.Identifier(f"c{self._columns[writer]}")
        table = sql.Identifier(f"own_{writer}")
        add = sql.SQL("alter table {} add column {} text default 'x'").format(table, column)
        self._do(writer, add)
        self._own(writer)

    def _emit(self, writer: int) -> None:
        # Within a subtransaction the server says only to which transaction a message belongs: in
        # parts nobody can know that it was rolled back.
        transactional = not self._savepoints[writer] and self._random.random() < 0.7
        self._do(writer, "select pg_logical_emit_message(%s, 'w', 'hello')", transactional)

    def _savepoint(self, writer: int) -> None:
        self._number += 1
        name = f"s{self._number}"
        self._savepoints[writer].append(name)
        self._do(writer, sql.SQL("savepoint {}").format(sql.Identifier(name)))

    def _back(self, writer: int) -> None:
        names = self._savepoints[writer]
        if names:
            place = self._random.randrange(len(names))
            self._do(writer, sql.SQL("rollback to {}").format(sql.Identifier(names[place])))
            del names[place + 1 :]

    def _release(self, writer: int) -> None:
        names = self._savepoints[writer]
        if names:
            place = self._random.randrange(len(names))
            self._do(writer, sql.SQL("release {}").format(sql.Identifier(names[place])))
            del names[place:]

    def _end(self, writer: int) -> None:
        self._savepoints[writer].clear()
        if self._random.random() < 0.75:
            self._connections[writer].commit()
        else:
            self._connections[writer].rollback()


def _named(query: str, writer: int) -> sql.Composed:
    return sql.SQL(query).format(sql.Identifier(f"own_{writer}"))
