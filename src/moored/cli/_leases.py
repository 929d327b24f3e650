"""`moored leases`: the leases of a store, read from the store itself, without a service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from moored.kernel import Clock, counted, duration
from moored.leases import Held, LeaseError, Leases, connect

from ._client import CommandFailed
from ._options import Json
from ._show import show, table

__all__ = ["app"]

T = TypeVar("T")

#: Enough of an id to name a lease among thousands, and short enough to type.
SHORT = 12

app = typer.Typer(
    name="leases",
    help="Show who holds what in a store of leases, and free what nobody should hold.",
    no_args_is_help=True,
)

StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="MOORED_LEASES_STORE",
        help="The store: `redis://…`, `postgresql://…` or `dynamodb://TABLE?…`.",
    ),
]
Key = Annotated[str | None, typer.Option("--key", help="Only the leases of this key.")]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Ids of leases, or their beginnings, as `list` shows."),
]
All = Annotated[bool, typer.Option("--all", help="All leases of the key that --key names.")]


@app.command("list")
def list_(store: StoreUrl, key: Key = None, as_json: Json = False) -> int:
    """Show the live leases of a store: who holds them, since when, and when they end."""
    found = _asking(store, lambda leases: leases.held(key))
    held = sorted(found, key=lambda each: (each.key, each.created_at))
    show([_plain(each) for each in held], as_json, lambda out: _show(out, held))
    return 0


@app.command()
def release(store: StoreUrl, ids: Ids = None, key: Key = None, everything: All = False) -> int:
    """End leases, whoever holds them.

    A holder that is alive learns of it at its next renewal (within a minute, by default); until
    then there may be one too many. A holder that is dead needs none of this: its leases end by
    themselves.
    """
    if everything and (ids or key is None):
        raise typer.BadParameter("--all goes with --key, and without ids")
    if not everything and not ids:
        raise typer.BadParameter("name the leases by their ids, or use --key KEY --all")
    ended = _asking(store, lambda leases: _release(leases, ids, key))
    for each in ended:
        typer.echo(f"released {_words(each)}")
    typer.echo(counted(len(ended), "lease") + " released")
    return 0


async def _release(leases: Leases, ids: Sequence[str] | None, key: str | None) -> list[Held]:
    held = await leases.held(key)
    chosen = held if ids is None else [_find(held, beginning) for beginning in ids]
    return [each for each in chosen if await leases.revoke(each.id, each.key)]


def _find(held: Sequence[Held], beginning: str) -> Held:
    found = [each for each in held if each.id.startswith(beginning)]
    if not found:
        raise CommandFailed(f"no live lease has an id that begins with {beginning!r}")
    if len(found) > 1:
        raise CommandFailed(
            f"{len(found)} leases have ids that begin with {beginning!r}: write more of it"
        )
    return found[0]


def _asking(store: str, ask: Callable[[Leases], Awaitable[T]]) -> T:
    if store.startswith("memory:"):
        raise CommandFailed("memory:// is within the process that holds the leases: ask that one")
    # What goes wrong is one line on stderr, not a line and a log.
    logging.getLogger("moored").addHandler(logging.NullHandler())

    async def asked() -> T:
        leases = connect(
            store, service_name="moored leases", on_unavailable="refuse", clock=Clock.current()
        )
        async with leases:
            return await ask(leases)

    try:
        return asyncio.run(asked())
    except LeaseError as error:
        raise CommandFailed(str(error)) from error


def _show(console: Console, held: Sequence[Held]) -> None:
    rows = table("key", "id", "owner", "service", "host", "pid", "fence", "age", "ends in")
    for each in held:
        rows.add_row(*map(Text, _row(each)))
    if held:
        console.print(rows)
    console.print(counted(len(held), "live lease"))


def _row(held: Held) -> list[str]:
    holder = held.holder
    return [
        held.key,
        held.id[:SHORT],
        holder.owner,
        holder.service_name,
        holder.host,
        str(holder.pid),
        str(held.fence),
        duration(_age(held)),
        duration(held.expires_in),
    ]


def _words(held: Held) -> str:
    holder = held.holder
    who = f"{holder.owner} of {holder.service_name} on {holder.host}, pid {holder.pid}"
    return f"{held.key} {held.id[:SHORT]} ({who}, held for {duration(_age(held))})"


def _plain(held: Held) -> dict[str, Any]:
    return {
        **{name: value for name, value in held._asdict().items() if name != "holder"},
        **asdict(held.holder),
    }


def _age(held: Held) -> float:
    return max(0.0, Clock.system().wall() - held.created_at)
