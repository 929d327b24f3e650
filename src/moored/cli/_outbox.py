"""`moored outbox`: install, upgrade or drop an outbox, show its state, and run its upkeep."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Annotated, Any, TypeVar

import psycopg
import typer
from rich.console import Console
from rich.text import Text

from moored.kernel import MooredError, counted, describe, duration
from moored.postgres.outbox import Outbox, OutboxStatus, Wake, ddl, grants, removal
from moored.postgres.server import pool_by

from ._client import CommandFailed
from ._options import Json
from ._show import show, table

__all__ = ["app"]

T = TypeVar("T")

#: Seconds that a command waits for a connection.
CONNECT_TIMEOUT = 10.0


class WakeChoice(Enum):
    """How publishers wake consumers."""

    NOTIFY = "notify"
    STREAM = "stream"
    POLL = "poll"


app = typer.Typer(
    name="outbox",
    help="Install an outbox in a database, show its state, and run its upkeep.",
    no_args_is_help=True,
)

DatabaseUrl = Annotated[
    str,
    typer.Option("--database-url", envvar="DATABASE_URL", help="The database, as a URL."),
]
Schema = Annotated[str, typer.Option("--schema", help="The schema of the outbox.")]
_WAKE_HELP = (
    "How publishers wake consumers: by the change stream of a Postgres, by NOTIFY, or not (poll)"
)
WakeBy = Annotated[WakeChoice, typer.Option("--wake", help=f"{_WAKE_HELP}.")]
Roles = Annotated[
    list[str] | None,
    typer.Option("--grant", metavar="ROLE", help="A role that may publish and consume; repeat it."),
]
Table = Annotated[
    str, typer.Argument(metavar="TABLE", help="The table, as `orders` or `shop.orders`.")
]


@app.command()
def install(
    database_url: DatabaseUrl,
    schema: Schema = "moored",
    wake: Annotated[
        WakeChoice | None,
        typer.Option(
            "--wake",
            help=f"{_WAKE_HELP}; by default as it is installed, and stream in a new outbox.",
        ),
    ] = None,
    grant: Roles = None,
    as_json: Json = False,
) -> int:
    """Create the tables and functions of an outbox, or bring older ones up to date.

    Running it again changes nothing. For services that have a pool and no Postgres, use
    --wake notify. Example:

        moored outbox install --database-url postgresql://owner@db/app --grant app
    """

    async def work(outbox: Outbox) -> Wake:
        by = wake.value if wake is not None else await outbox.installed_wake() or "stream"
        await outbox.install(wake=by, roles=grant or ())
        return by

    by = _with_outbox(database_url, schema, work)
    text = f"the outbox in schema {schema} is installed, with --wake {by}"
    show({"installed": schema, "wake": by}, as_json, lambda out: out.print(Text(text)))
    return 0


@app.command()
def upgrade(database_url: DatabaseUrl, schema: Schema = "moored", as_json: Json = False) -> int:
    """Bring an older outbox up to date while services publish.

    The indexes are built concurrently, one partition after the other; then the tables, functions
    and stored cursors are converted, for which publishers wait for half a second at a time.
    Programs of older versions go on publishing, and their consumers end with an error. Example:

        moored outbox upgrade --database-url postgresql://owner@db/app
    """
    _with_outbox(
        database_url,
        schema,
        lambda outbox: outbox.upgrade(report=lambda text: None if as_json else typer.echo(text)),
    )
    text = f"the outbox in schema {schema} is up to date"
    show({"upgraded": schema}, as_json, lambda out: out.print(Text(text)))
    return 0


@app.command("sql")
def sql_(
    schema: Schema = "moored",
    wake: WakeBy = WakeChoice.STREAM,
    grant: Roles = None,
    as_json: Json = False,
) -> int:
    """Print the statements that `install` runs, for a migration tool.

    Example:

        moored outbox sql --grant app > migrations/0007_outbox.sql
    """
    text = _sql(lambda: ddl(schema, wake=wake.value))
    text += "".join(grants(role, schema) for role in grant or ())
    show({"sql": text}, as_json, lambda _: typer.echo(text, nl=False))
    return 0


@app.command()
def status(database_url: DatabaseUrl, schema: Schema = "moored", as_json: Json = False) -> int:
    """Show the size, the consumers and their lag, and the transaction that holds delivery back.

    Examples:

        moored outbox status --database-url postgresql://app@db/app

        moored outbox status --json | jq '.consumers[].lag'
    """
    found = _with_outbox(database_url, schema, lambda outbox: outbox.status())
    show(found.plain(), as_json, lambda out: _show(out, found))
    return 0


@app.command()
def prune(
    database_url: DatabaseUrl,
    schema: Schema = "moored",
    retain: Annotated[
        float, typer.Option("--retain-days", help="Days that events are kept.")
    ] = 7.0,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", help="Also drop the oldest partitions beyond this many bytes."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Create the partitions of the next days, and drop those beyond the retention.

    A running `Outbox` does it by itself, every ten minutes. Exits with 1 if an open transaction
    prevents the drop. Example for cron, where only the owner of the tables may do it:

        moored outbox prune --database-url postgresql://owner@db/app --retain-days 3
    """
    days = retain * 86400.0
    done = _with_outbox(
        database_url, schema, lambda outbox: outbox.upkeep(), retain=days, max_bytes=max_bytes
    )
    made = f"{counted(done.created, 'partition')} created"
    dropped = "an open transaction prevents the drop of partitions: run this again later"
    if done.dropped is not None:
        dropped = f"{counted(done.dropped, 'partition')} dropped"
    show(done._asdict(), as_json, lambda out: out.print(Text(f"{made}; {dropped}")))
    return 1 if done.dropped is None else 0


@app.command()
def capture(
    table_name: Table,
    database_url: DatabaseUrl,
    schema: Schema = "moored",
    channel: Annotated[
        str | None, typer.Option("--channel", help="The events' channel; by default the table.")
    ] = None,
    tenant_column: Annotated[
        str | None, typer.Option("--tenant-column", help="The column that holds the tenant.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Publish every change of a table from now on, by triggers.

    Example:

        moored outbox capture shop.orders --channel orders --tenant-column org_id
    """
    _with_outbox(
        database_url,
        schema,
        lambda outbox: outbox.capture(table_name, channel=channel, tenant_column=tenant_column),
    )
    text = f"every change of {table_name} is published"
    show({"captured": table_name}, as_json, lambda out: out.print(Text(text)))
    return 0


@app.command()
def uncapture(
    table_name: Table, database_url: DatabaseUrl, schema: Schema = "moored", as_json: Json = False
) -> int:
    """Remove the triggers of `capture`.

    Example:

        moored outbox uncapture shop.orders
    """
    _with_outbox(database_url, schema, lambda outbox: outbox.uncapture(table_name))
    text = f"changes of {table_name} are no longer published"
    show({"uncaptured": table_name}, as_json, lambda out: out.print(Text(text)))
    return 0


@app.command()
def uninstall(
    database_url: DatabaseUrl = "",
    schema: Schema = "moored",
    yes: Annotated[bool, typer.Option("--yes", help="Drop it without a question.")] = False,
    print_sql: Annotated[
        bool, typer.Option("--sql", help="Only print the statements, for a migration tool.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show an outbox, and drop it with all its events and the triggers of captured tables.

    Stop its consumers and publishers before: from then on, a transaction that publishes gets an
    error. The schema stays, because other tables may be in it. Examples:

        moored outbox uninstall --database-url postgresql://owner@db/app

        moored outbox uninstall --sql > migrations/0012_no_outbox.sql
    """
    if print_sql:
        text = _sql(lambda: removal(schema))
        show({"sql": text}, as_json, lambda _: typer.echo(text, nl=False))
        return 0
    if not database_url:
        raise typer.BadParameter("give --database-url or DATABASE_URL, or --sql")

    async def look(outbox: Outbox) -> tuple[OutboxStatus, list[str]]:
        return await outbox.status(), await outbox.captured_tables()

    def shown(out: Console) -> None:
        _show(out, found)
        for each in tables:
            out.print(Text(f"every change of {each} is published"))

    found, tables = _with_outbox(database_url, schema, look)
    if not as_json:
        show(None, False, shown)
    done = yes or _confirmed(schema)
    if done:
        _with_outbox(database_url, schema, lambda outbox: outbox.uninstall())
    text = f"the outbox in schema {schema} is {'dropped' if done else 'left as it is'}"
    show({"dropped": schema if done else None}, as_json, lambda out: out.print(Text(text)))
    return 0 if done else 1


def _confirmed(schema: str) -> bool:
    if not sys.stdin.isatty():
        raise CommandFailed("this drops the events, read or not: to confirm it, add --yes")
    return typer.confirm(f"Drop the outbox in schema {schema} with all its events?", err=True)


def _with_outbox(
    url: str, schema: str, work: Callable[[Outbox], Awaitable[T]], **options: Any
) -> T:
    # An error is printed as one line on stderr, and not logged as well.
    logging.getLogger("moored").addHandler(logging.NullHandler())

    async def run() -> T:
        pool = pool_by(url, name="outbox", max_size=1, timeout=CONNECT_TIMEOUT, fail_fast=True)
        outbox = _sql(lambda: Outbox(pool, schema=schema, show_queries=True, **options))
        async with pool:
            return await work(outbox)

    try:
        return asyncio.run(run())
    except psycopg.errors.InsufficientPrivilege as error:
        raise CommandFailed(
            f"{describe(error)}: run it as an owner of the database and of the table; for status "
            "and prune, it is enough that an owner has run `moored outbox install --grant ROLE`"
        ) from error
    except (psycopg.Error, MooredError, OSError) as error:
        raise CommandFailed(describe(error)) from error


def _sql(made: Callable[[], T]) -> T:
    try:
        return made()
    except ValueError as error:
        raise CommandFailed(str(error)) from error


def _show(console: Console, found: OutboxStatus) -> None:
    console.print(Text(str(found)))
    if found.held_back is not None:
        console.print(Text(f"delivery is held back: {found.held_back}"))
    rows = table("consumer", "lag", "cursor stored", "cursor")
    for each in found.consumers:
        texts = each.name, duration(each.lag), f"{duration(each.stored)} ago", str(each.cursor)
        rows.add_row(*map(Text, texts))
    if found.consumers:
        console.print(rows)
