"""`moored snapshot`: write a table as COPY does, in chunks, with its progress."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import psycopg
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moored.kernel import Clock, MooredError, describe
from moored.postgres.decode import Types
from moored.postgres.snapshot import CopyMeter, Snapshot, TableReader

from ._client import CommandFailed

__all__ = ["snapshot"]

DatabaseUrl = Annotated[
    str, typer.Option("--database-url", envvar="DATABASE_URL", help="The database, as a URL.")
]
Table = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table, as `orders` or `shop.orders`.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file to write; default: stdout.")
]
Where = Annotated[
    str | None, typer.Option("--where", help="A condition in SQL: only rows that meet it.")
]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="A column besides the key; repeat it.")
]
Rows = Annotated[int, typer.Option("--chunk-rows", min=1, help="Rows of one transaction.")]


def snapshot(
    table: Table,
    database_url: DatabaseUrl,
    output: Output = None,
    where: Where = None,
    column: Columns = None,
    chunk_rows: Rows = 50_000,
) -> int:
    """Write the rows of a table in the text format of COPY, and show the progress on stderr.

    It is read in chunks, each in a short transaction of its own, so that it does not hold back
    vacuum. Example:

        moored snapshot orders --database-url postgresql://app@db/shop -o orders.tsv
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(database_url) as conn:
            yield conn

    reader = TableReader(
        connect, Types(), table, where=where, columns=column, rows=chunk_rows, binary=False
    )
    meter = CopyMeter(lambda name, text: None, Clock.current())
    copy = Snapshot(reader, lambda: None, meter, consistent=False, start=None)
    target = nullcontext(sys.stdout.buffer) if output is None else output.open("wb")
    try:
        with target as file:
            asyncio.run(_write(copy, file))
    except (psycopg.Error, MooredError) as error:
        raise CommandFailed(describe(error)) from error
    typer.echo(f"{table}: {copy.progress}", err=True)
    return 0


async def _write(copy: Snapshot, file: BinaryIO) -> None:
    async with copy:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task("rows", total=copy.progress.estimated or None)
            async for block in copy.blocks():
                file.write(block)
                bar.update(task, completed=copy.progress.rows)
