"""`moored consumers`: the items that consumers could not handle, and have parked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import psycopg
import typer
from rich.console import Console
from rich.text import Text

from moored.kernel import MooredError, counted, describe, duration
from moored.postgres import ParkedItem
from moored.postgres.parking import (
    drop_parked,
    list_parked,
    parking_ddl,
    parking_grants,
    parking_refused,
    retry_parked,
)

from ._client import CommandFailed
from ._options import Json
from ._show import show, table

__all__ = ["app"]

T = TypeVar("T")

#: Seconds that a command waits for a connection.
CONNECT_TIMEOUT = 10
#: Seconds between two looks for the result of a retry.
LOOK = 0.2

app = typer.Typer(
    name="consumers",
    help="Show the items that consumers could not handle and have parked; retry or drop them.",
    no_args_is_help=True,
)

DatabaseUrl = Annotated[
    str,
    typer.Option("--database-url", envvar="DATABASE_URL", help="The database, as a URL."),
]
Name = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Only the items of this consumer.")
]
Ids = Annotated[
    list[int] | None,
    typer.Argument(metavar="[NUMBER]...", help="The numbers of items, as `list` shows them."),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.0, help="Seconds to wait for the result; 0 to only ask for it."
    ),
]
Roles = Annotated[
    list[str] | None,
    typer.Option("--grant", metavar="ROLE", help="A role whose consumers may park; repeat it."),
]


@app.command(name="list")
def list_(database_url: DatabaseUrl, consumer: Name = None, as_json: Json = False) -> int:
    """Show the parked items, the oldest first, each with its last error.

    Examples:

        moored consumers list --database-url postgresql://app@db/orders

        moored consumers list --consumer search --json | jq '.[].error'
    """
    found = _run(database_url, lambda conn: _chosen(conn, consumer, None))
    show([each.plain() for each in found], as_json, lambda out: _show(out, found))
    return 0


@app.command()
def retry(
    database_url: DatabaseUrl,
    numbers: Ids = None,
    consumer: Name = None,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> int:
    """Let the running service give parked items to the same function again.

    An item that was handled is removed; one that has failed again stays parked, with the new
    error. Exits with 1 unless all were handled within the timeout; those that no running consumer
    has taken by then are retried when it runs. Examples:

        moored consumers retry 3 4 --database-url postgresql://app@db/orders

        moored consumers retry --consumer search
    """

    _check_chosen(numbers, consumer)

    async def work(conn: psycopg.AsyncConnection[Any]) -> dict[str, list[ParkedItem]]:
        asked = await _chosen(conn, consumer, numbers)
        await retry_parked(conn, [each.id for each in asked])
        deadline = time.monotonic() + timeout
        while True:
            now = {each.id: each for each in await list_parked(conn)}
            result: dict[str, list[ParkedItem]] = {"handled": [], "failed": [], "waiting": []}
            for each in asked:
                left = now.get(each.id)
                if left is None:
                    result["handled"].append(each)
                else:
                    result["failed" if left.tries > each.tries else "waiting"].append(left)
            if not result["waiting"] or time.monotonic() >= deadline:
                return result
            await asyncio.sleep(LOOK)

    done = _run(database_url, work)

    def shown(out: Console) -> None:
        for each in done["handled"]:
            out.print(Text(f"{each.id} was handled: {each.what}"))
        for each in done["failed"]:
            out.print(Text(f"{each.id} has failed again: {each.error}"))
        for each in done["waiting"]:
            taken = "has no result yet: the service that has taken it may have been stopped"
            waits = f"waits for the consumer {each.consumer!r} to take it"
            out.print(Text(f"{each.id} {waits if each.retry else taken}"))

    show({key: [each.id for each in found] for key, found in done.items()}, as_json, shown)
    return 0 if len(done["handled"]) == sum(map(len, done.values())) or not timeout else 1


@app.command()
def drop(
    database_url: DatabaseUrl,
    numbers: Ids = None,
    consumer: Name = None,
    as_json: Json = False,
) -> int:
    """Delete parked items: their consumers never handle them.

    Examples:

        moored consumers drop 3 --database-url postgresql://app@db/orders

        moored consumers drop --consumer search
    """

    _check_chosen(numbers, consumer)

    async def work(conn: psycopg.AsyncConnection[Any]) -> list[ParkedItem]:
        found = await _chosen(conn, consumer, numbers)
        await drop_parked(conn, [each.id for each in found])
        return found

    found = _run(database_url, work)
    text = "\n".join(f"dropped {each.id}: {each.what}" for each in found)
    show({"dropped": [each.id for each in found]}, as_json, lambda out: out.print(Text(text)))
    return 0


@app.command()
def install(database_url: DatabaseUrl, grant: Roles = None, as_json: Json = False) -> int:
    """Create the table of parked items, and let roles use it.

    A consumer creates it by itself if its role may create a schema. Example:

        moored consumers install --database-url postgresql://owner@db/orders --grant app
    """
    statements = _statements(grant or ())
    _run(database_url, lambda conn: conn.execute(statements.encode()))
    show(
        {"installed": "moored.parked"},
        as_json,
        lambda out: out.print(Text("the table moored.parked is installed")),
    )
    return 0


@app.command("sql")
def sql_(grant: Roles = None, as_json: Json = False) -> int:
    """Print the statements that `install` runs, for a migration tool.

    Example:

        moored consumers sql --grant app > migrations/0008_parked.sql
    """
    text = _statements(grant or ())
    show({"sql": text}, as_json, lambda _: typer.echo(text, nl=False))
    return 0


def _statements(roles: Iterable[str]) -> str:
    return parking_ddl() + "".join(map(parking_grants, roles))


def _check_chosen(numbers: Sequence[int] | None, consumer: str | None) -> None:
    if not numbers and consumer is None:
        raise typer.BadParameter("give the numbers of items, or --consumer NAME for all of its")


async def _chosen(
    conn: psycopg.AsyncConnection[Any], consumer: str | None, numbers: Sequence[int] | None
) -> list[ParkedItem]:
    """Return the items with these numbers; without numbers, all of a consumer, or all."""
    found = [each for each in await list_parked(conn) if consumer in (None, each.consumer)]
    if not numbers:
        return found
    missing = sorted(set(numbers) - {each.id for each in found})
    if missing:
        of = f" of the consumer {consumer!r}" if consumer else ""
        raise CommandFailed(f"no item{of} with the number {missing[0]} is parked: see the list")
    return [each for each in found if each.id in numbers]


def _run(url: str, work: Callable[[psycopg.AsyncConnection[Any]], Awaitable[T]]) -> T:
    # An error is printed as one line on stderr, and not logged as well.
    logging.getLogger("moored").addHandler(logging.NullHandler())

    async def run() -> T:
        async with await psycopg.AsyncConnection.connect(
            url, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_TIMEOUT
        ) as conn:
            try:
                return await work(conn)
            except psycopg.errors.InsufficientPrivilege as error:
                raise await parking_refused(conn, describe(error)) from error

    try:
        return asyncio.run(run())
    except (psycopg.Error, MooredError, OSError) as error:
        raise CommandFailed(describe(error)) from error


def _show(console: Console, found: Sequence[ParkedItem]) -> None:
    rows = table("number", "consumer", "of", "parked", "tries", "item", "error")
    now = datetime.now(UTC)
    for each in found:
        since = duration(max(0.0, (now - each.parked).total_seconds()))
        texts = each.consumer, each.source, f"{since} ago", str(each.tries), each.what, each.error
        asked = " (retry)" if each.retry else ""
        rows.add_row(*map(Text, (f"{each.id}{asked}", *texts)))
    if found:
        console.print(rows)
    console.print(counted(len(found), "parked item"))
