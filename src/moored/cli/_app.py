"""The commands. Each parses its options, runs the service or queries one, and prints."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moored._version import __version__
from moored.kernel import SECRETS, MooredError
from moored.service import READY_STATES, ConfigError, data_dir_of, load_config, state_dir_of
from moored.service import serve as run_service

from . import (
    _consumers,
    _doctor,
    _leases,
    _new,
    _outbox,
    _schema_trigger,
    _sessions,
    _show,
    _slots,
    _snapshot,
    _soak,
    _target,
)
from ._client import CommandFailed, UnknownComponent
from ._options import ConfigFile, Json, configurable
from ._running import Token, Url, client_for
from ._timeline import Timeline

__all__ = ["app", "run"]

READY, NOT_READY, REFUSED = 0, 1, 2
#: Names in the error of an unknown component: there may be one for each session.
MOST_NAMES = 10
# click's UsageError: some versions of Typer contain a copy of click, others import it.
UsageProblem: type[Any] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="moored",
    help="The connection layer for Python services: run the service, and show its state.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

app.add_typer(_consumers.app)
app.add_typer(_leases.app)
app.add_typer(_outbox.app)
app.add_typer(_sessions.app)
app.add_typer(_slots.app)
app.command()(_snapshot.snapshot)
app.command()(_schema_trigger.schema_trigger)
app.command()(_doctor.doctor)
app.command()(_soak.soak)
app.command()(_new.init)


def _complete_component(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the paths of the running service's tree, for shell completion."""
    url = ctx.params.get("url") or os.environ.get("MOORED_URL") or None
    token = ctx.params.get("admin_token") or os.environ.get("MOORED_ADMIN_TOKEN")
    try:
        state = client_for(url, token, timeout=1.0).status()
    except MooredError:
        return []
    paths = (path for path, _ in _show.tree_of(state["tree"]).paths())
    return sorted(path for path in paths if incomplete in path)


Component = Annotated[
    str | None,
    typer.Argument(
        metavar="COMPONENT",
        help="The path of a component, or the end of it: `postgres` for `moored/postgres`.",
        autocompletion=_complete_component,
    ),
]
Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.")]
Last = Annotated[
    str | None,
    typer.Option("--last", metavar="TIME", help="Only what went wrong within this time: 10m, 2h."),
]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODULE:APP]",
        help="The app to run, such as `orders:app`; without it, PostgreSQL alone is run.",
    ),
]
RunDemo = Annotated[
    bool,
    typer.Option(
        "--demo",
        help="Run a whole service with temporary data, and a page with buttons to break it.",
    ),
]
Reload = Annotated[
    bool,
    typer.Option("--reload", help="Start again when a Python file here changes: in development."),
]
Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]


@app.callback(invoke_without_command=True)
def _moored(ctx: typer.Context, version: Version = False) -> int:
    if version:
        typer.echo(f"moored {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    return READY


@app.command()
@configurable
def serve(
    target: Target = None,
    demo: RunDemo = False,
    config: ConfigFile = None,
    reload: Reload = False,
    **given: Any,
) -> int:
    """Start the service: an app, or an embedded PostgreSQL unless a database URL is given.

    Ctrl-C or SIGTERM stops everything in order; a second Ctrl-C forces it. Each option can also
    be set by the environment variable in brackets, or in moored.toml by its name with
    underscores. The command line has priority over the environment, and the environment over the
    file. Examples:

        moored serve --database-url postgresql://app@db/orders

        moored serve orders:app --host 0.0.0.0 --log-format json
    """
    settings = load_config(config, given)
    if demo and target is not None:
        raise typer.BadParameter(f"--demo runs an app of its own: leave out {target}, or --demo")
    if reload:
        rest = [each for each in sys.argv[1:] if each != "--reload"]
        return _target.run_again_on_change([sys.executable, "-m", "moored.cli", *rest])
    if demo:
        # By its name: the demo uses moored.testing, which the commands must not import.
        return int(importlib.import_module("moored.demo").run_demo(settings))
    if target is not None:
        return _target.find_app(target).run(settings)
    return run_service(settings)


@app.command()
def status(url: Url = None, admin_token: Token = None, as_json: Json = False) -> int:
    """Show a running service: its conditions, its parts and its tree.

    Exits with 0 if the service is ready (active, sleeping, degraded or waiting), with 1 if it is
    starting or failed, and with 2 if no service responds. A part that is not required makes it
    degraded at worst; `--json | jq .degraded` lists the parts that do not work. Examples:

        moored status --url http://api-1:8089

        moored status --json | jq .parts
    """
    client = client_for(url, admin_token)
    state = client.status()
    _show.show(state, as_json, lambda out: out.print(_show.status(state, client.url)))
    return READY if state["status"] in READY_STATES else NOT_READY


@app.command()
def top(
    url: Url = None, admin_token: Token = None, interval: Interval = 1.0, as_json: Json = False
) -> int:
    """Show a running service, as `status` does, with a timeline, anew every second, until Ctrl-C.

    Where the output is no terminal, and with `--json`, it is shown once. Example:

        moored top --interval 5
    """
    client, console = client_for(url, admin_token), Console(highlight=False)

    def shown(state: Mapping[str, Any]) -> RenderableType:
        return _show.status(state, client.url, Timeline(state, client.lanes()))

    if as_json or not console.is_terminal:
        state = client.status()
        _show.show(state, as_json, lambda out: out.print(shown(state)))
        return 0
    last: RenderableType = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = last = shown(client.status())
            except CommandFailed as error:
                now = Group(Text(f"{error}; trying again. This is from before:", "bold red"), last)
            live.update(now, refresh=True)
            time.sleep(interval)


@app.command()
def tree(url: Url = None, admin_token: Token = None, as_json: Json = False) -> int:
    """Show the supervision tree of a running service.

    Example: `moored tree --url http://api-1:8089`
    """
    data = client_for(url, admin_token).status()["tree"]
    _show.show(data, as_json, lambda out: out.print(_show.tree(data)))
    return 0


@app.command()
def explain(
    component: Component = None,
    url: Url = None,
    admin_token: Token = None,
    last: Last = None,
    as_json: Json = False,
) -> int:
    """Explain why a component of a running service is in its present state.

    Without a component it shows how the service is, and what went wrong, also what has recovered,
    since the start or within the last time: `moored explain --last 10m`.
    """
    client = client_for(url, admin_token)
    if component is None:
        state = client.status()
        since = 0.0 if last is None else time.time() - _seconds(last)
        found = _show.outages_since(state, since)
        # A part that has never worked has no outage: the sentence says so.
        lines = list(_show.outages(found)) or [Text("  no part has stopped working")]
        _show.show(found, as_json, lambda out: out.print(Group(Text(state["sentence"]), *lines)))
        return 0
    if last is not None:
        raise typer.BadParameter(f"--last shows all parts: leave out {component}, or --last")
    try:
        explanation = client.explain(component)
    except UnknownComponent as error:
        names = [path.rpartition("/")[2] for path in error.known]
        near = [each for each in error.known if component in each]
        near = near or get_close_matches(component, names) or list(client.status()["parts"])
        raise CommandFailed(f"{error}; known: {', '.join(near[:MOST_NAMES])}") from None
    _show.show(explanation, as_json, lambda out: _show.show_explanation(out, explanation))
    return 0


@app.command()
@configurable
def config(config: ConfigFile = None, as_json: Json = False, **given: Any) -> int:
    """Show the configuration that `serve` would use, and the source of each value.

    It accepts the options of `serve`. Secrets are hidden. Example:

        moored config --json | jq .database_url
    """
    effective = load_config(config, given)
    found: dict[str, Any] = {"state_dir": state_dir_of(effective)}
    if effective.is_embedded:
        found["data_dir"] = data_dir_of(effective)
    effective = dataclasses.replace(effective, **found)
    settings = list(effective.settings())
    data = {each.name: {"value": each.value, "from": each.source} for each in settings}
    _show.show(data, as_json, lambda out: _show.show_config(out, settings))
    return 0


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a usage or configuration error is one line on stderr and exit code 2."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        for each in given:  # an error may quote a connection string from any argument
            SECRETS.add_from(each)
        code = app(given, prog_name="moored", standalone_mode=False)
    except UsageProblem as problem:
        command = problem.ctx.command_path if getattr(problem, "ctx", None) else "moored"
        return _refuse(f"{problem.format_message().rstrip('.')}. See {command} --help.")
    except ConfigError as error:
        return _refuse(*error.mistakes)
    except CommandFailed as error:
        return _refuse(str(error))
    return code if isinstance(code, int) else 0


def _seconds(text: str) -> float:
    """Return the seconds of a time such as "90s", "10m" or "2h"."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is not a time: write 90s, 10m or 2h") from None


def _refuse(*lines: str) -> int:
    for line in lines:
        typer.echo(f"moored: {SECRETS.hide(' '.join(line.split()))}", err=True)
    return REFUSED
