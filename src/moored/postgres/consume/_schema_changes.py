"""Changes of a table's columns that leave its rows as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Columns", "SchemaChanged", "altered"]

#: The columns of a table, by their numbers in pg_attribute: name, type, modifier of a numeric,
#: whether it has a default, and the type as SQL (stored states of before may lack it).
Columns = Mapping[str, Sequence[Any]]


class SchemaChanged(NamedTuple):
    """The columns of a table are others than before, and no row was changed by that.

    A consumer of `changes(schema_changes=True)` gets one for each table that was altered, once,
    soon after the change or when it attaches again; one that it has not read when it is closed is
    lost. Transactions with the new columns may come before it: the columns of a change are always
    those of its `relation`. A change of the columns
    that changes rows, such as a new column with a default, is a `Reset` instead.
    """

    #: The table with its schema.
    table: str
    #: The types of new columns, as SQL, by their names.
    added: Mapping[str, str] = {}
    #: The names of columns that were dropped.
    dropped: tuple[str, ...] = ()
    #: The new names of columns, by their names before.
    renamed: Mapping[str, str] = {}
    #: The types before and now, as SQL, by the names of the columns.
    retyped: Mapping[str, tuple[str, str]] = {}

    def __str__(self) -> str:
        parts = [f"{name} was added ({kind})" for name, kind in self.added.items()]
        parts += [f"{name} was dropped" for name in self.dropped]
        parts += [f"{before} was renamed to {now}" for before, now in self.renamed.items()]
        parts += [f"{name} is {now}, not {was}" for name, (was, now) in self.retyped.items()]
        return f"columns of {self.table}: {'; '.join(parts)}"


def altered(table: str, before: Columns | None, now: Columns | None) -> SchemaChanged | None:
    """Return how the columns of a table differ; None if they do not."""
    if before is None or now is None:
        return None
    both = [(before[number], now[number]) for number in now if number in before]
    found = SchemaChanged(
        table,
        {column[0]: _type(column) or "" for n, column in now.items() if n not in before},
        tuple(column[0] for n, column in before.items() if n not in now),
        {was[0]: is_now[0] for was, is_now in both if was[0] != is_now[0]},
        {
            is_now[0]: (kind, new)
            for was, is_now in both
            if (kind := _type(was)) and (new := _type(is_now)) and kind != new
        },
    )
    return found if any(found[1:]) else None


def _type(column: Sequence[Any]) -> str | None:
    return column[4] if len(column) > 4 else None
