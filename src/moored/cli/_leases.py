"""`moored leases`: list and release the leases of a store, without a running service."""

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

#: Characters of an id that are shown: unique among thousands of leases, and short enough to type.
SHORT = 12

app = typer.Typer(
    name="leases",
    help="List the leases of a store and their holders, and release leases.",
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
    typer.Argument(metavar="[ID]...", help="Ids of leases, or prefixes of ids, as `list` shows."),
]
All = Annotated[bool, typer.Option("--all", help="All leases of the key that --key names.")]


@app.command("list")
def list_(store: StoreUrl, key: Key = None, as_json: Json = False) -> int:
    """List the live leases of a store, with their holders, age and expiry.

    Example: `moored leases list --store redis://cache --key db/orders`
    """
    found = _with_client(store, lambda leases: leases.held(key))
    held = sorted(found, key=lambda each: (each.key, each.created_at))
    show([_plain(each) for each in held], as_json, lambda out: _show(out, held))
    return 0


@app.command()
def release(
    store: StoreUrl,
    ids: Ids = None,
    key: Key = None,
    everything: All = False,
    as_json: Json = False,
) -> int:
    """Release leases of any holder.

    A running holder is notified at its next renewal (within a minute, by default); until then the
    limit may be exceeded. The leases of a dead holder need no release: they expire. Example:
    `moored leases release --store redis://cache 5d1c09a7f3e2`
    """
    if everything and (ids or key is None):
        raise typer.BadParameter("--all requires --key, and takes no ids")
    if not everything and not ids:
        raise typer.BadParameter("give the ids of the leases, or use --key KEY --all")
    ended = _with_client(store, lambda leases: _release(leases, ids, key))
    lines = [f"released {_words(each)}" for each in ended]
    lines.append(counted(len(ended), "lease") + " released")
    released = [_plain(each) for each in ended]
    show(released, as_json, lambda out: out.print(Text("\n".join(lines))))
    return 0


async def _release(leases: Leases, ids: Sequence[str] | None, key: str | None) -> list[Held]:
    held = await leases.held(key)
    chosen = held if ids is None else [_find(held, prefix) for prefix in ids]
    return [each for each in chosen if await leases.revoke(each.id, each.key)]


def _find(held: Sequence[Held], prefix: str) -> Held:
    found = [each for each in held if each.id.startswith(prefix)]
    if not found:
        raise CommandFailed(f"no live lease has an id that begins with {prefix!r}")
    if len(found) > 1:
        raise CommandFailed(
            f"{len(found)} leases have ids that begin with {prefix!r}: give more characters"
        )
    return found[0]


def _with_client(store: str, work: Callable[[Leases], Awaitable[T]]) -> T:
    if store.startswith("memory:"):
        raise CommandFailed(
            "the leases of memory:// exist only in the process that holds them, not in this command"
        )
    # An error is printed as one line on stderr, and not logged as well.
    logging.getLogger("moored").addHandler(logging.NullHandler())

    async def run() -> T:
        leases = connect(
            store, service_name="moored leases", on_unavailable="refuse", clock=Clock.current()
        )
        async with leases:
            return await work(leases)

    try:
        return asyncio.run(run())
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
