"""PostgreSQL as a part of the service: the embedded server, and a connection that watches it.

::

    starting / launching  ─▶  starting / connecting  ─▶  starting / checking  ─▶  active / watching
        ▲                          ▲                                                │
        └── the server has ended   └──── the connection is lost, or does not answer ┘

Losing the database is never the end of the service: both children are restarted for as long as
it takes. Only at the start, before it was ever reached, is that an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from holdfast.embedded import EmbeddedError, EmbeddedPostgres, PortInUse, default_data_dir
from holdfast.kernel import (
    Backoff,
    Chart,
    Child,
    Context,
    Machine,
    Registry,
)

from ._config import Config
from ._errors import DatabaseUnreachable, ServiceError
from ._line import Line
from ._part import Part, Wiring
from ._redact import place_of

__all__ = ["CHART", "READY", "Database", "data_dir_of", "database_part"]

NAME = "postgres"
READY = "postgres_ready"

CHART = Chart(
    phases={"starting": ("launching", "connecting", "checking"), "active": ("watching",)},
    moves={
        "*": ("starting/launching", "starting/connecting"),
        "starting/connecting": "starting/checking",
        "starting/checking": "active/watching",
    },
    initial="starting/launching",
)

#: Quick at first, because a crashed server is usually back at once; then kind to one that is not.
RETRY = Backoff(0.2, 5.0, jitter=0.25)
#: How long one attempt to connect may take: a black hole must not look like a slow server for ever.
CONNECT_TIMEOUT = 5.0
#: How often an idle connection is asked whether the server still answers.
CHECK_EVERY = 2.0
#: How long an answer may take before the server counts as lost.
CHECK_TIMEOUT = 5.0
#: A fast shutdown, an immediate one, and the end by force, each with its own limit, fit into this.
STOP_TIMEOUT = 60.0


def data_dir_of(config: Config) -> Path:
    """Where the embedded server keeps its data."""
    return config.data_dir or default_data_dir()


def database_part(config: Config) -> Part:
    """PostgreSQL, embedded or by its URL."""
    # Without a limit of restarts: a database may be away for days, and then come back.
    return Part(
        NAME,
        lambda wiring: Database(config, wiring).children(),
        conditions=(READY,),
        intensity=None,
    )


class Database:
    """The children that run and watch PostgreSQL, and what they share."""

    def __init__(self, config: Config, wiring: Wiring) -> None:
        self._config = config
        self._wiring = wiring
        self._port = config.postgres_port
        self._servers: Registry[str, EmbeddedPostgres] = Registry("embedded servers")
        self._server: EmbeddedPostgres | None = None
        self._began = wiring.clock.monotonic()
        self._machine = Machine(
            f"holdfast/{NAME}", CHART, clock=wiring.clock, recorder=wiring.recorder
        )
        wiring.machines.append(self._machine)
        wiring.last_resorts.append(self.kill_server)

    def children(self) -> Sequence[Child]:
        """The server, if it is ours to run, and behind it what watches it."""
        server = Child("server", self.run_server, backoff=RETRY, shutdown=STOP_TIMEOUT)
        watch = Child("watch", self.watch, backoff=RETRY)
        return [server, watch] if self._config.is_embedded else [watch]

    async def run_server(self, ctx: Context) -> None:
        """Run the embedded server until it ends by itself, which is a failure."""
        ctx.started()
        server = EmbeddedPostgres(
            data_dir_of(self._config),
            bin_dir=self._config.postgres_bin_dir,
            port=self._port,
            on_progress=lambda text: self._tell(ctx, text),
        )
        self._server = server
        try:
            async with server:
                self._port = server.port
                ctx.register(self._servers, NAME, server)
                raise EmbeddedError(str(await server.wait_ended()))
        except Exception as error:
            self._not_ready("starting/launching", error)
            if isinstance(error, PortInUse):
                self._port = self._config.postgres_port  # somebody took the one we had
            self._wiring.give_up(self._cannot_start(error))
            raise

    def kill_server(self) -> None:
        """End the server without its consent; its guard ends what it leaves behind."""
        if self._server is not None and (pid := self._server.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def watch(self, ctx: Context) -> None:
        """Keep one line and ask again and again; fail when there is no answer."""
        ctx.started()
        url = await self._url()
        self._machine.move("starting/connecting", cause=f"the server is at {place_of(url)}")
        try:
            line = await Line.dial(url, timeout=self._patience())
            try:
                await self._keep_asking(ctx, line)
            finally:
                await line.close()
        except DatabaseUnreachable as lost:
            self._not_ready("starting/connecting", lost)
            if self._time_left() <= 0 and not self._config.is_embedded:
                self._wiring.give_up(self._never_reached(url, lost.reason))
            raise

    async def _url(self) -> str:
        if self._config.database_url is not None:
            return self._config.database_url
        return (await self._servers.via(NAME).wait()).url

    async def _keep_asking(self, ctx: Context, line: Line) -> None:
        self._machine.move("starting/checking", cause="connected")
        await line.ask(timeout=CHECK_TIMEOUT)
        ctx.healthy()
        self._machine.move("active", cause=f"PostgreSQL {line.version} answers")
        self._wiring.monitor.set(READY, detail=f"PostgreSQL {line.version} at {line.place}")
        while True:
            await line.rest(CHECK_EVERY)
            await line.ask(timeout=CHECK_TIMEOUT)

    def _time_left(self) -> float:
        """Seconds in which the database may still be reached for the first time."""
        return self._began + self._config.database_wait - self._wiring.clock.monotonic()

    def _patience(self) -> float:
        left = self._time_left()
        # The last attempt has time to find out what is wrong, rather than that time is over.
        return min(max(left, CONNECT_TIMEOUT / 5), CONNECT_TIMEOUT) if left > 0 else CONNECT_TIMEOUT

    def _not_ready(self, state: str, error: Exception) -> None:
        self._machine.move(state, cause=error)
        self._wiring.monitor.clear(READY, error)

    def _cannot_start(self, error: Exception) -> ServiceError:
        line = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, EmbeddedError) and error.log:
            line += f" (its log: {data_dir_of(self._config) / 'postgres.log'})"
        return ServiceError(
            f"the embedded PostgreSQL cannot start: {line}. "
            "Name other data with --data-dir, an installed PostgreSQL with --postgres-bin-dir, "
            "or one that runs already with --database-url."
        )

    def _never_reached(self, url: str, reason: str) -> DatabaseUnreachable:
        source = self._config.sources.get("database_url", "database_url")
        tried = self._wiring.clock.monotonic() - self._began
        return DatabaseUnreachable(
            f"cannot reach PostgreSQL at {place_of(url)} within {tried:.0f} s: {reason}. "
            f"Start it, or correct {source}; without one, holdfast starts a PostgreSQL of its own.",
            reason=reason,
        )

    def _tell(self, ctx: Context, text: str) -> None:
        ctx.record(text)
        self._wiring.say(f"PostgreSQL: {text}")
