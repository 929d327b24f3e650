"""`moored snapshot`: write tables as COPY does, in chunks, with their progress."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, BinaryIO

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
    back. A file is written under a temporary name in its directory and renamed when it is whole.
    Example:

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
    work = _write_all(database_url, files, options)
    try:
        # What is written to stdout cannot be removed, and a reader that stalls blocks this process.
        return asyncio.run(_until_signal(work) if output is not None else work)
    except (psycopg.Error, MooredError) as error:
        raise CommandFailed(describe(error)) from error


async def _until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Cancel the work at SIGTERM and SIGHUP, as `asyncio.run` does at SIGINT."""
    loop, task, code = asyncio.get_running_loop(), asyncio.ensure_future(work), 0

    def cancel(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = 128 + number
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
        loop.call_soon_threadsafe(task.cancel)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if not code:
            raise
        return code
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is cancel:
                signal.signal(number, signal.SIG_DFL)


async def _write_all(url: str, files: dict[str, Path | None], options: dict[str, Any]) -> int:
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
    return 0


async def _write(reader: TableReader, path: Path | None, bar: Progress) -> None:
    meter = CopyMeter(lambda name, text: None, Clock.current())
    left = "the output is incomplete" if _is_stream(path) else f"{path} was not written"
    try:
        async with Snapshot(reader, meter, consistent=False, start=None) as copy:
            task = bar.add_task(reader.name, total=copy.progress.estimated or None)
            with _opened(path) as file:
                async for block in copy.blocks():
                    file.write(block)
                    bar.update(task, completed=copy.progress.rows)
    except BaseException as error:
        typer.echo(f"{reader.name}: stopped: {left}", err=True)
        if isinstance(error, OSError):
            why = error.strerror or error
            raise CommandFailed(f"{path or 'stdout'} cannot be written: {why}") from error
        raise
    typer.echo(f"{reader.name}: {copy.progress}", err=True)


def _is_stream(path: Path | None) -> bool:
    """Whether it is stdout, a device or a pipe, which are written directly."""
    return path is None or (path.exists() and not path.is_file())


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO]:
    """Open the output; a file is replaced only when the block ends without an error."""
    if path is None:
        yield sys.stdout.buffer
        return
    if _is_stream(path):
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # a link stays a link
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            if path.exists():
                shutil.copymode(path, draft)
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
