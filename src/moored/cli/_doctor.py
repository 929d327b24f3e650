"""`moored doctor`: check a database for everything that Moored needs."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from moored.kernel import counted
from moored.postgres.doctor import Examination, Severity, examine

from ._client import CommandFailed
from ._options import Json
from ._show import show, table

__all__ = ["doctor"]

_STYLES = {Severity.STOPS: "bold red", Severity.WARNS: "bold yellow", Severity.NOTES: "bold"}

Url = Annotated[str, typer.Argument(metavar="URL", envvar="DATABASE_URL", help="The database.")]
_replication = typer.Option(envvar="MOORED_REPLICATION_URL", help="Its URL without a pooler.")
_notify = typer.Option(envvar="NOTIFY_URL", help="Its URL without a pooler, for LISTEN.")
_table = typer.Option("--table", metavar="TABLE", help="A table to follow; repeat it.")


def doctor(
    url: Url,
    replication_url: Annotated[str | None, _replication] = None,
    notify_url: Annotated[str | None, _notify] = None,
    tables: Annotated[list[str] | None, _table] = None,
    stream_id: Annotated[str, typer.Option(help="The name of the stream.")] = "default",
    pool_size: Annotated[int, typer.Option(help="The size of both pools together.")] = 20,
    as_json: Json = False,
) -> int:
    """Check a database for everything that Moored needs, and show how each finding is fixed.

    Nothing is written to the database. Exits with 1 if a finding stops a part of Moored, and
    with 0 otherwise. Example:

        moored doctor postgresql://app@db/orders --table orders
    """
    # A finding reports it; it is not logged as well.
    logging.getLogger("moored").addHandler(logging.NullHandler())
    given: dict[str, Any] = {"replication_url": replication_url, "notify_url": notify_url}
    given |= {"stream_id": stream_id, "pool_size": pool_size}
    try:
        found = asyncio.run(examine(url, tables=tables or (), **given))
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    show(found.plain(), as_json, lambda out: _show(out, found))
    return 0 if found.ok else 1


def _show(console: Console, found: Examination) -> None:
    for each in found.connections:
        console.print(Text(str(each)))
    rows = table("severity", "check", "finding and fix")
    for finding in found.findings:
        text = Text(finding.problem)
        for statement in finding.statements:
            text.append(f"\n{statement};", "green")
        text.append(f"\n{finding.advice}" if finding.advice else "", "dim")
        rows.add_row(Text(finding.severity.value, _STYLES[finding.severity]), finding.check, text)
    if not console.is_terminal:
        console.width = 10_000  # a statement stays on its line
    if found.findings:
        console.print(rows)
    console.print(Text(_verdict(found)))


def _verdict(found: Examination) -> str:
    if not found.findings:
        return "nothing found: the server has everything that Moored needs"
    stops = sum(each.severity is Severity.STOPS for each in found.findings)
    which = f"{stops} stop{'s' if stops == 1 else ''}" if stops else "none stops"
    return f"{counted(len(found.findings), 'finding')}: {which} Moored"
