"""The copies of tables that one `Postgres` makes, for `snapshot()` and `follow()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import psycopg

from moored.kernel import refuse

from .._position import Position, Resume
from ..consume import Changes, mistakes
from ._follow import Follow, SavedCopies
from ._position import CopyPosition
from ._reader import TableReader
from ._snapshot import CopyMeter, Snapshot

if TYPE_CHECKING:
    from ..manage import Stack

__all__ = ["Copies"]


class Copies:
    """Makes snapshots and followers, and knows how far those that run have copied.

    :param connect: checks out a connection of the callers' pool.
    """

    def __init__(
        self,
        stack: Stack,
        connect: Callable[[], AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]],
    ) -> None:
        self._stack = stack
        self._connect = connect
        self._saved = SavedCopies(stack.store)
        self._meters: WeakSet[CopyMeter] = WeakSet()

    def snapshot(
        self,
        table: str,
        *,
        where: str | None,
        columns: Sequence[str] | None,
        chunk_rows: int | None,
        consistent: bool,
        start: CopyPosition | str | None,
    ) -> Snapshot:
        """Return the rows of a table."""
        return Snapshot(
            self._reader(table, where, columns, chunk_rows, "snapshot()"),
            self._new_meter(),
            consistent=consistent,
            start=CopyPosition.parse(start) if isinstance(start, str) else start,
        )

    def follow(
        self,
        table: str,
        attach: Callable[[Position | Resume | None], Changes],
        *,
        where: str | None,
        columns: Sequence[str] | None,
        chunk_rows: int,
        begin_again: bool,
        start: CopyPosition | Position | str | Resume | None,
    ) -> Follow:
        """Return the rows of a table, and then its changes.

        :param attach: attaches the consumer of the changes, at a position.
        """
        reader = self._reader(table, where, columns, chunk_rows, "follow()")
        if isinstance(start, (Position, str)):
            start = CopyPosition.parse(str(start))
        changes = attach(start.position if isinstance(start, CopyPosition) else start)
        changes.copied = True
        return Follow(
            changes,
            self._stack.hub,
            self._saved,
            reader,
            self._new_meter(),
            where=where is not None,
            columns=columns is not None,
            begin_again=begin_again,
            start=start,
        )

    def progress(self) -> dict[str, Any]:
        """Return how far each running copy is, by its table, as plain data."""
        return {each.name: each.progress.as_dict() for each in self._meters if each.running}

    def _new_meter(self) -> CopyMeter:
        meter = CopyMeter(self._stack.events.emit, self._stack.clock)
        self._meters.add(meter)
        return meter

    def _reader(
        self,
        table: str,
        where: str | None,
        columns: Sequence[str] | None,
        chunk_rows: int | None,
        caller: str,
    ) -> TableReader:
        wrong = mistakes([table])
        if isinstance(columns, str):
            wrong.append(f"columns={columns!r} must be a list of names, such as [{columns!r}]")
        if chunk_rows is not None and chunk_rows < 1:
            wrong.append(f"chunk_rows={chunk_rows!r} must be at least 1")
        refuse(caller, wrong)
        settings = self._stack.settings
        return TableReader(
            self._connect,
            self._stack.types,
            table,
            where=where,
            columns=columns,
            rows=chunk_rows,
            binary=settings.binary,
            publication=settings.publication_name,
            followed=caller == "follow()",
        )
