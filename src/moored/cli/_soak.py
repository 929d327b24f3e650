"""`moored soak`: put load on a pool to the user's own server, and report how it does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from statistics import mean
from typing import Annotated, Any

import psycopg
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from moored.kernel import counted, describe
from moored.reservoir import ReservoirConfig

from ._client import CommandFailed
from ._options import Json
from ._show import show, table
from ._soak_load import Line, three_lines

__all__ = ["soak"]

#: The most columns of the plot, and its heights.
WIDTH, BLOCKS = 50, "▁▂▃▄▅▆▇█"
#: Seconds that a connection beside the pool may take.
CONNECT_TIMEOUT = 10

ENABLED = "MOORED_RESERVOIR_ENABLED"

# The counts of other roles' sessions that every role may read.
_LEFT = b"""
SELECT least(
  current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
    - coalesce(current_setting('reserved_connections', true)::int, 0)
    - (SELECT sum(numbackends) FROM pg_stat_database),
  (SELECT rolconnlimit - (SELECT count(*) FROM pg_stat_activity WHERE usesysid = pg_roles.oid)
    FROM pg_roles WHERE rolname = current_user AND NOT rolsuper AND rolconnlimit >= 0)
)::int
"""

DatabaseUrl = Annotated[str, typer.Option("--url", envvar="DATABASE_URL", help="The database.")]
Callers = Annotated[int, typer.Option(min=2, help="Callers of the burst: more than connections.")]
Minutes = Annotated[float, typer.Option(min=0.01, help="The time of all three lines together.")]
MaxSize = Annotated[int, typer.Option(help="The maximum number of connections.")]
Ending = Annotated[bool, typer.Option("--kill", help="End some of its own backends now and then.")]


def soak(
    url: DatabaseUrl,
    callers: Callers = 100,
    minutes: Minutes = 10.0,
    max_size: MaxSize = ReservoirConfig.max_size,
    kill: Ending = False,
    as_json: Json = False,
) -> int:
    """Put load on a server through a pool with your settings, and report how the pool does.

    Three lines of load, one after the other: steady (fewer callers than connections), burst (more
    callers than connections) and expiry (all connections expire). Callers only execute `SELECT 1`.
    More connections than the server has left are refused. The settings of the pool come from the
    environment, as by `ReservoirConfig.from_env`: MOORED_RESERVOIR_RATE and so on. Ctrl-C and
    SIGTERM end it early, with the report so far. Exits with 1 if a caller failed for another reason
    than a kill. Example:

        moored soak --url postgresql://app@db/orders --max-size 20 --minutes 3 --kill
    """
    # What callers notice is in the report; it is not logged as well.
    for name in ("moored", "psycopg"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    # Enabled as in a pool without variables, unless one says otherwise.
    environ = {**os.environ, ENABLED: os.environ.get(ENABLED) or "true"}
    try:
        config = ReservoirConfig.from_env(environ=environ, max_size=max_size)
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    if callers <= max_size:
        raise CommandFailed(f"--callers {callers} must be more than --max-size {max_size}")
    lines = three_lines(config, callers, seconds=20 * minutes, kill=kill)
    try:
        ended_by = asyncio.run(_run(lines, url))
    except psycopg.Error as error:
        raise CommandFailed(describe(error)) from error
    data = [line.plain() for line in lines if line.samples or line.errors]
    show(data, as_json, lambda out: _show(out, data))
    return 128 + ended_by if ended_by else int(any(line.errors for line in lines))


async def _run(lines: list[Line], url: str) -> int:
    """Run the lines; returns the number of the signal that ended them early, or 0."""
    loop, now, ended_by = asyncio.get_running_loop(), lines[0], 0

    def end(number: int) -> None:
        nonlocal ended_by
        ended_by = number
        work.cancel()
        loop.remove_signal_handler(number)  # the second one ends the process at once

    async def run_all() -> None:
        nonlocal now
        for now in lines:
            try:
                left = await _connections_left(url)
                if now is lines[0] and left < now.config.max_size:
                    raise CommandFailed(
                        f"the server has {counted(left, 'connection')} left, and --max-size is "
                        f"{now.config.max_size}: lower it, or raise max_connections (or the "
                        "CONNECTION LIMIT of the role)"
                    )
                await now.run(url)
            except psycopg.Error as error:
                if not lines[0].samples:
                    raise
                now.failed(error)

    work = asyncio.ensure_future(run_all())
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, end, each)
    console, shown = Console(stderr=True), lambda: Text(now.progress())
    progress = Live(console=console, get_renderable=shown, refresh_per_second=1, transient=True)
    with progress, suppress(asyncio.CancelledError):
        await work
    return ended_by


async def _connections_left(url: str) -> int:
    connecting = psycopg.AsyncConnection.connect(url, connect_timeout=CONNECT_TIMEOUT)
    async with await connecting as conn:
        (left,) = await (await conn.execute(_LEFT)).fetchone() or (0,)
    return int(left)


def _show(console: Console, lines: list[dict[str, Any]]) -> None:
    rows = table("", *(line["line"] for line in lines))
    for name in (key for line in lines[:1] for key in line if isinstance(line[key], int | float)):
        rows.add_row(name.replace("_", " "), *(str(line[name]) for line in lines))
    found = [", ".join(f"{n} {kind}" for kind, n in line["errors"].items()) for line in lines]
    rows.add_row("errors", *(each or "none" for each in found))
    console.print(rows)
    for line in lines:
        console.print(Text(f"\n{line['line']}"))
        for name, values in line["each_second"].items():
            step = -(-len(values) // WIDTH) or 1
            means = [mean(values[at : at + step]) for at in range(0, len(values), step)]
            top = max(means, default=0) or 1
            blocks = "".join(BLOCKS[int(7 * each / top)] for each in means)
            console.print(Text(f"  {name:<9} {blocks}  {max(values, default=0)} at most"))
        if kills := line["kills"]:
            console.print(Text(f"  {_recovery(kills)}"))
        for kind, message in line["messages"].items():
            console.print(Text(f"  {kind}: {message}", "red"))


def _recovery(kills: list[dict[str, Any]]) -> str:
    backends, errors = (sum(each[key] for each in kills) for key in ("backends", "errors"))
    most = max(each["errors"] for each in kills)
    took = [each["full_after"] for each in kills if each["full_after"] is not None]
    full = f"after at most {max(took):.2f} s" if took else "not before the end"
    return (
        f"{counted(len(kills), 'kill')} of {counted(backends, 'backend')} together: "
        f"{counted(errors, 'error')}, at most {most} of one kill; full again {full}"
    )
