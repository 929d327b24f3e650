"""`moored sessions`: the sessions of accounts in a running service."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from moored.kernel import counted, duration

from ._client import Client, CommandFailed
from ._options import Json
from ._running import Token, Url, client_for
from ._show import show, table

__all__ = ["app"]

app = typer.Typer(
    name="sessions",
    help="List the sessions of a running service, and stop one.",
    no_args_is_help=True,
)

PartName = Annotated[
    str | None,
    typer.Option("--part", help="The name of the part, where an app has several with sessions."),
]
State = Annotated[
    str | None, typer.Option("--state", help="Only the sessions in this state, such as `online`.")
]
Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="The account of the session.")]
Drain = Annotated[
    float,
    typer.Option("--drain", min=0, max=60, help="Seconds to wait for the outcomes of its sends."),
]


@app.command("list")
def list_sessions(
    part: PartName = None,
    state: State = None,
    url: Url = None,
    admin_token: Token = None,
    as_json: Json = False,
) -> int:
    """List the sessions: their state, the reason, and the next attempt to connect.

    Example: `moored sessions list --state connecting/waiting`
    """
    client = client_for(url, admin_token)
    found = client.sessions(_part_of(client, part))
    found = [each for each in found if state in (None, each["state"])]
    show(found, as_json, lambda out: _show(out, found))
    return 0


@app.command()
def stop(
    profile: Profile,
    part: PartName = None,
    drain: Drain = 0.0,
    url: Url = None,
    admin_token: Token = None,
    as_json: Json = False,
) -> int:
    """Stop the session of an account: it disconnects, and does not connect again.

    Sends without an outcome become unknown, or not sent if they were not written. The program may
    start the session again. Example: `moored sessions stop alice --drain 5`
    """
    client = client_for(url, admin_token)
    done = client.stop_session(_part_of(client, part), profile, drain)
    show(done, as_json, lambda out: out.print(Text(f"stopped the session of {profile}")))
    return 0


def _part_of(client: Client, wanted: str | None) -> str:
    """Return the part with the sessions; without a name, the only one."""
    kinds = client.status()["kinds"]
    found = [name for name, kind in kinds.items() if kind == "sessions"]
    if wanted is not None and wanted not in found:
        names = ", ".join(found) or "none"
        raise CommandFailed(f"no part {wanted!r} of the service has sessions: there are {names}")
    if wanted is None and len(found) != 1:
        hint = f"choose one with --part: {', '.join(found)}" if found else "add app.sessions(…)"
        raise CommandFailed(f"the service has {counted(len(found), 'part')} with sessions: {hint}")
    return wanted or found[0]


def _show(console: Console, found: list[dict[str, Any]]) -> None:
    rows = table("profile", "protocol", "state", "for", "link", "sending", "waiting", "reason")
    for each in found:
        retry = each["next_attempt_in"]
        reason = each["reason"] if each["state"] != "online" else ""
        rows.add_row(
            Text(each["profile"]),
            each["protocol"],
            each["state"],
            duration(each["for"]),
            str(each["generation"]),
            str(each["sending"]),
            str(each["waiting"]),
            Text((reason or "") + (f"; next attempt in {duration(retry)}" if retry else "")),
        )
    if found:
        console.print(rows)
    console.print(counted(len(found), "session"))
