"""`moored snapshot`: write tables as COPY does, in chunks, with their progress."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moored.kernel import SECRETS, Clock, MooredError, Tasks, describe
from moored.postgres.decode import Types
from moored.postgres.snapshot import CopyMeter, Snapshot, TableReader
from moored.reservoir import AsyncConnectionPool

from ._client import CommandFailed

__all__ = ["snapshot"]

DatabaseUrl = Annotated[
    str, typer.Option("--database-url", envvar="DATABASE_URL", help="The database, as a URL.")
]
Tables = Annotated[
    list[str], typer.Argument(metavar="TABLE...", help="Tables, as `orders` or `shop.orders`.")
]
_output = typer.Option(
    "--output",
    "-o",
    help="The file to write, or a directory for a file TABLE.tsv of each; default: stdout.",
)
Where = Annotated[
    str | None, typer.Option("--where", help="A condition in SQL: only rows that meet it.")
]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="A column besides the key; repeat it.")
]
Rows = Annotated[int | None, typer.Option("--chunk-rows", min=1, help="Rows of one transaction.")]


def snapshot(
    tables: Tables,
    database_url: DatabaseUrl,
    output: Annotated[Path | None, _output] = None,
    where: Where = None,
    column: Columns = None,
    chunk_rows: Rows = None,
) -> int:
    """Write the rows of tables in the text format of COPY, and show the progress on stderr.

    They are read in chunks, each in a short transaction of its own, so that vacuum is not held
    back. Example:

        moored snapshot orders --database-url postgresql://app@db/shop -o orders.tsv
    """
    SECRETS.add_from(database_url)
    directory = output if output is not None and output.is_dir() else None
    if directory is None and len(tables) > 1:
        raise CommandFailed("for several tables, --output must be a directory that exists")
    files = {
        table: directory / f"{table}.tsv" if directory is not None else output for table in tables
    }
    options = {"where": where, "columns": column, "rows": chunk_rows}
    try:
        asyncio.run(_write_all(database_url, files, options))
    except (psycopg.Error, MooredError) as error:
        raise CommandFailed(describe(error)) from error
    except OSError as error:
        name = error.filename or output or "stdout"
        raise CommandFailed(f"{name} cannot be written: {error.strerror or error}") from error
    return 0


async def _write_all(url: str, files: dict[str, Path | None], options: dict[str, Any]) -> None:
    """Write all tables at the same time."""
    # A wrong URL is reported at once; later, a failure of the connection is retried.
    await (await psycopg.AsyncConnection.connect(url)).close()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console, tasks = Console(stderr=True), Tasks()
    async with AsyncConnectionPool(url, max_size=2 * len(files)) as pool:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            try:
                for table, path in files.items():
                    reader = TableReader(pool.connection, Types(), table, binary=False, **options)
                    tasks.start(_write(reader, path, bar))
                await asyncio.gather(*tasks)
            finally:
                await tasks.cancel()


async def _write(reader: TableReader, path: Path | None, bar: Progress) -> None:
    meter = CopyMeter(lambda name, text: None, Clock.current())
    async with Snapshot(reader, lambda: None, meter, consistent=False, start=None) as copy:
        task = bar.add_task(reader.name, total=copy.progress.estimated or None)
        with nullcontext(sys.stdout.buffer) if path is None else path.open("wb") as file:
            async for block in copy.blocks():
                file.write(block)
                bar.update(task, completed=copy.progress.rows)
    typer.echo(f"{reader.name}: {copy.progress}", err=True)
