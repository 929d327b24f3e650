"""PostgreSQL as a part of the service: the embedded server, and the connection manager.

::

    moored/postgres     one_for_one
    ├─ server             if it is embedded: restarted without limit
    └─ manager            `moored.postgres.Postgres`, with a tree of its own

A lost database never ends the service: the server is restarted, and the manager reconnects. Only
two things end it: a database that was not reached within `database_wait` at the start, and, at any
time, a configuration of the database that an operator must change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from moored.embedded import EmbeddedError, EmbeddedPostgres, PortInUse, default_data_dir
from moored.kernel import Backoff, Child, Context, Registry
from moored.postgres import ConfigurationError, Postgres
from moored.postgres.report import server_of

from ._config import Config
from ._errors import DatabaseUnreachable, ServiceError
from ._part import Part, Wiring
from ._shown_postgres import ShownPostgres, place_of

__all__ = ["READY", "Database", "data_dir_of", "database_part", "state_dir_of"]

NAME = "postgres"
READY = "postgres_ready"

#: Short at first, because a crashed server usually starts again at once.
RETRY = Backoff(0.2, 5.0, jitter=0.25)
#: Seconds beyond `database_wait` for the first attempt to fail with its own error.
CONNECT_TIMEOUT = 5.0
#: Seconds between two checks whether the database was reached.
POLL_INTERVAL = 0.05
#: Longer than the limits of a fast shutdown, an immediate one and SIGKILL together.
STOP_TIMEOUT = 60.0
#: Longer than the seven steps of the manager's shutdown.
MANAGER_STOP_TIMEOUT = 20.0


def data_dir_of(config: Config) -> Path:
    """Return the directory of the embedded server's data."""
    return config.data_dir or default_data_dir()


def state_dir_of(config: Config) -> Path:
    """Return the directory for the positions of the stream's consumers."""
    if config.state_dir is not None:
        return config.state_dir
    beside = data_dir_of(config) if config.is_embedded else default_data_dir().parent
    return beside / "streams"


def database_part(config: Config) -> Part:
    """Return PostgreSQL, embedded or by its URL, as a part."""
    # Without a limit of restarts: an outage of the database may last for days.
    return Part(
        NAME,
        lambda wiring: Database(config, wiring).children(),
        conditions=(READY,),
        strategy="one_for_one",
        intensity=None,
        ties=_servers_of(config),
        kind="stream",
        server="PostgreSQL",
    )


def _servers_of(config: Config) -> set[str]:
    if config.is_embedded:
        return {"embedded server"}
    urls = config.database_url, config.replication_url
    return {server_of(url) for url in urls if url is not None}


class Database:
    """The children that run PostgreSQL and its connection manager, and their shared state."""

    def __init__(self, config: Config, wiring: Wiring) -> None:
        self._config = config
        self._wiring = wiring
        self._port = config.postgres_port
        self._servers: Registry[str, EmbeddedPostgres] = Registry("embedded servers")
        self._server: EmbeddedPostgres | None = None
        self._moved = asyncio.Event()
        self._began = wiring.clock.monotonic()
        self._shown = ShownPostgres(wiring, NAME)
        wiring.last_resorts.append(self.kill_server)

    def children(self) -> Sequence[Child]:
        """Return the embedded server, if there is one, and the connection manager."""
        server = Child("server", self.run_server, backoff=RETRY, shutdown=STOP_TIMEOUT)
        manager = Child("manager", self.run_manager, backoff=RETRY, shutdown=MANAGER_STOP_TIMEOUT)
        return [server, manager] if self._config.is_embedded else [manager]

    # -- the embedded server -------------------------------------------------------------------

    async def run_server(self, ctx: Context) -> None:
        """Run the embedded server until it ends by itself, which is a failure."""
        ctx.started()
        if ctx.generation == 1:
            where = data_dir_of(self._config)
            self._wiring.say(
                f"no database URL is set: running a PostgreSQL of its own, which keeps its data in "
                f"{where} (choose with DATABASE_URL or --data-dir)"
            )
        server = EmbeddedPostgres(
            data_dir_of(self._config),
            bin_dir=self._config.postgres_bin_dir,
            port=self._port,
            on_progress=lambda text: self._notify(ctx, text),
        )
        self._server = server
        try:
            async with server:
                self._port = server.port
                ctx.register(self._servers, NAME, server)
                raise EmbeddedError(str(await server.wait_ended()))
        except Exception as error:
            if isinstance(error, PortInUse):
                # Another program took the port: the next start chooses a free one.
                self._port = self._config.postgres_port
                self._moved.set()
            self._wiring.give_up(self._cannot_start(error))
            raise

    def kill_server(self) -> None:
        """Send SIGKILL to the server; its guard ends the remaining processes."""
        if self._server is not None and (pid := self._server.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- the manager ---------------------------------------------------------------------------

    async def run_manager(self, ctx: Context) -> None:
        """Run the connection manager; raise if the embedded server changes its port."""
        ctx.started()
        url = await self._url()
        self._moved.clear()
        pg = self._new_manager(url)
        try:
            await pg.open()
        except ConfigurationError as error:
            self._wiring.fail(ServiceError(str(error)))
            raise
        with self._shown.shown(pg, ctx.path):
            try:
                if not self._config.is_embedded:
                    await self._until_reached(pg)
                await self._moved.wait()
                raise ServiceError("the embedded PostgreSQL has changed its port")
            finally:
                await pg.close()

    def _new_manager(self, url: str) -> Postgres:
        config = self._config
        return Postgres(
            url,
            replication_url=config.replication_url,
            notify_url=config.notify_url,
            stream_id=config.stream_id,
            pool_size=config.pool_size,
            state_dir=state_dir_of(config),
            sleep_after=config.sleep_after,
            # Without a token, every user of this machine can read the status.
            show_queries=config.admin_token is not None,
            clock=self._wiring.clock,
            recorder=self._wiring.recorder,
        )

    async def _url(self) -> str:
        if self._config.database_url is not None:
            return self._config.database_url
        return (await self._servers.via(NAME).wait()).url

    # -- the first connection ------------------------------------------------------------------

    async def _until_reached(self, pg: Postgres) -> None:
        """Give up the start if the database is not reached in time; the manager keeps trying."""
        deadline = self._began + self._config.database_wait
        while not pg.statistics()["event_counts"].get("waiting_for_connection_lock"):
            late = self._wiring.clock.monotonic() - deadline
            failed = pg.statistics()["event_counts"].get("connection_error")
            # The first attempt may take longer, so that its own error is reported.
            if late >= (0.0 if failed else CONNECT_TIMEOUT):
                self._wiring.give_up(self._unreachable(pg))
                return
            await asyncio.sleep(POLL_INTERVAL)

    # -- messages ------------------------------------------------------------------------------

    def _cannot_start(self, error: Exception) -> ServiceError:
        line = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, EmbeddedError) and error.log:
            line += f" (its log: {data_dir_of(self._config) / 'postgres.log'})"
        return ServiceError(
            f"the embedded PostgreSQL cannot start: {line}. "
            "Choose another data directory with --data-dir, an installed PostgreSQL with "
            "--postgres-bin-dir, or a running server with --database-url."
        )

    def _unreachable(self, pg: Postgres) -> DatabaseUnreachable:
        knob = "replication_url" if self._config.replication_url is not None else "database_url"
        source = self._config.sources.get(knob, knob)
        tried = self._wiring.clock.monotonic() - self._began
        errors = [each.detail for each in pg.last_events if each.name == "connection_error"]
        reason = errors[-1].partition("; next try")[0] if errors else "timed out"
        return DatabaseUnreachable(
            f"cannot reach PostgreSQL at {place_of(pg.settings.replication_url)} within "
            f"{tried:.0f} s: {reason}. Start it, or correct {source}; without a database URL, "
            "moored starts a PostgreSQL of its own.",
            reason=reason,
        )

    def _notify(self, ctx: Context, text: str) -> None:
        ctx.record(text)
        self._wiring.say(f"PostgreSQL: {text}")
