"""`moored slots`: the replication slots of a server, which keep its log from being removed."""

from __future__ import annotations

from typing import Annotated, Any

import psycopg
import typer
from psycopg.rows import dict_row
from rich.filesize import decimal

from moored.kernel import describe

from ._client import CommandFailed
from ._options import Json
from ._show import show, table

__all__ = ["app"]

#: Seconds that a command waits for a connection.
CONNECT_TIMEOUT = 10

_LIST = """
select slot_name as slot, slot_type as kind, database, active_pid as pid, wal_status as status,
  pg_wal_lsn_diff(
    case when pg_is_in_recovery() then pg_last_wal_receive_lsn() else pg_current_wal_lsn() end,
    restart_lsn
  )::bigint as retained
from pg_replication_slots order by retained desc nulls last, slot_name
"""

app = typer.Typer(
    name="slots",
    help="Show the replication slots of a server, and drop those that nothing uses.",
    no_args_is_help=True,
)

DatabaseUrl = Annotated[
    str,
    typer.Option("--database-url", envvar="DATABASE_URL", help="A database of the server."),
]
Slot = Annotated[str, typer.Argument(metavar="SLOT", help="The name of a slot.")]


@app.command(name="list")
def list_slots(database_url: DatabaseUrl, as_json: Json = False) -> int:
    """Show the slots of a server, the one that retains most of its log first.

    Example: `moored slots list --database-url postgresql://app@db/orders`
    """
    found = _query(database_url, _LIST)
    rows = table("slot", "kind", "database", "used by", "retains", "status")
    for each in found:
        user = "nothing" if each["pid"] is None else f"backend {each['pid']}"
        kept = "—" if each["retained"] is None else decimal(each["retained"])
        rows.add_row(
            each["slot"], each["kind"], each["database"] or "—", user, kept, each["status"] or "—"
        )
    show(found, as_json, lambda out: out.print(rows if found else "there are no slots"))
    return 0


@app.command()
def drop(slot: Slot, database_url: DatabaseUrl, as_json: Json = False) -> int:
    """Drop a slot that nothing uses: what its consumers have not read yet is lost for them.

    Example: `moored slots drop moored_slot_default --database-url postgresql://app@db/orders`
    """
    found = {each["slot"]: each for each in _query(database_url, _LIST)}
    if slot not in found:
        raise CommandFailed(f"there is no slot {slot!r}: there are {', '.join(found) or 'none'}")
    if (pid := found[slot]["pid"]) is not None:
        raise CommandFailed(f"backend {pid} uses {slot}: stop the service that streams from it")
    _query(database_url, "select pg_drop_replication_slot(%s)", slot)
    show({"dropped": slot}, as_json, lambda out: out.print(f"dropped {slot}"))
    return 0


def _query(url: str, query: str, *parameters: str) -> list[dict[str, Any]]:
    try:
        with psycopg.connect(
            url, autocommit=True, row_factory=dict_row, connect_timeout=CONNECT_TIMEOUT
        ) as conn:
            return conn.execute(query.encode(), parameters).fetchall()
    except psycopg.Error as error:
        raise CommandFailed(describe(error)) from error
