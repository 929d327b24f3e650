"""The app of the demo, and what its buttons break."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from moored.app import App
from moored.kernel import Backoff, counted
from moored.reservoir import AsyncConnectionPool
from moored.service import Config, ConfigError, is_loopback
from moored.testing.demo import DemoServer as ChatServer

from ._faults import DemoFault, Faults
from ._load import CHANNEL, SIGN_IN_AFTER, Load
from ._panel import faults_part
from ._servers import EchoProcess, PostgresServer

__all__ = ["DemoApp", "run_demo"]

PREFIX = "moored-demo-"
POOL = "demo pool"
KILL_BACKENDS = """
select pg_terminate_backend(pid) from pg_stat_activity
where backend_type = 'walsender' or pid = (
    select pid from pg_stat_activity where application_name = %s
    order by state = 'idle' desc limit 1
)
"""
WELCOME = "this is the demo: open the link above in a browser, and break something"
NO_GRPC = "no gRPC channel in this demo, because grpcio is missing: pip install 'moored[grpc]'"


def run_demo(config: Config) -> int:
    """Run the demo until a signal stops it; returns the exit code."""
    if not is_loopback(config.host):
        raise ConfigError(
            "the demo listens on a loopback address only, because anyone who reaches it may break "
            f"it: leave out --host {config.host}"
        )
    if config.sources.get("log_level", "default") == "default":
        config = replace(config, log_level="warning")  # the page shows the rest
    with temporary_directory() as directory:
        demo = DemoApp(directory)
        try:
            return demo.app.run(config)
        finally:
            demo.close()


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield an empty directory, after removing those of demos that were killed.

    The kernel releases the lock of a killed process.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), open(left / "lock", "r+") as lock:
            flock(lock, LOCK_EX | LOCK_NB)
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as made, open(f"{made}/lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield Path(made)


class DemoApp:
    """The app of the demo, and its faults.

    :param directory: an empty directory for its data and sockets.
    """

    def __init__(self, directory: Path) -> None:
        self.app = app = App("demo")
        self._server = server = PostgresServer(directory)
        app.component(name="server", shutdown=60.0, runs=server.addresses, kind="PostgreSQL")(
            server.run
        )
        after = ["server"]
        self._db = app.pool(
            server.url,
            name="db",
            min_size=8,
            max_size=12,
            max_lifetime=120,
            kwargs={"application_name": POOL},
            after=after,
        )
        self._pg = pg = app.postgres(
            server.url,
            replication_url=server.direct_url,
            notify_url=server.direct_url,
            pool_size=6,
            state_dir=directory / "state",
            after=after,
        )
        live = app.broker(pg.outbox, name="live", channels=[CHANNEL], after=["postgres"])
        self._echo = EchoProcess() if find_spec("grpc") else None
        grpc = None
        if self._echo is not None:
            runs = [self._echo.target]
            app.component(name="grpc-server", runs=runs, kind="gRPC server")(self._echo.run)
            grpc = app.channel(self._echo.target, name="grpc")
        self._chat = ChatServer(history=1000)
        sessions = app.sessions(
            name="chat", server="chat-server", backoff=Backoff(0.5, 5.0, jitter="full")
        )
        self.load = Load(self._db, pg, live, grpc, sessions, self._chat)
        app.consumer(pg, "search", tables=["orders"], name="search", after=after)(self.load.index)
        after = ["db", "postgres", "live", "chat"]
        uses = ["db", "chat"] if grpc is None else ["db", "grpc", "chat"]
        app.component(name="load", after=after, uses=uses, kind="demo traffic")(self.load.run)
        self._discards = Discards(self._db)
        faults = {each.name: each for each in self._faults()}
        self.faults = Faults(faults, self.load.served_since)
        app.add(faults_part(self.faults, [WELCOME] if self._echo else [NO_GRPC, WELCOME]))

    def close(self) -> None:
        """Release the ports."""
        for port in (*self._server.reserved, *([self._echo.reserved] if self._echo else [])):
            port.close()

    def _faults(self) -> Iterator[DemoFault]:
        yield DemoFault(
            "kill-backends",
            "End its connections",
            "Terminates the backend of the change stream, and one of the pool.",
            self._kill_backends,
            self._discards.noticed,
            healed=self._discards.replaced,
        )
        yield DemoFault(
            "restart-postgres",
            "Restart PostgreSQL",
            "Shuts the server down. Its supervisor starts it again.",
            self._server.shut_down,
        )
        yield DemoFault(
            "black-hole",
            "Silence the direct path",
            "Change stream and listener lose every byte, without an error, until both notice it.",
            self._server.proxy.black_hole,
            may_end=self._direct_path_is_down,
            end=self._server.proxy.resume,
        )
        yield DemoFault(
            "expire-pool",
            "Expire all connections",
            "Every connection of the pool expires at once.",
            self._expire_pool,
            self._discards.noticed,
            healed=self._discards.replaced,
        )
        if self._echo is not None:
            yield DemoFault(
                "kill-grpc",
                "Kill the gRPC server",
                "SIGKILL to the server's process. Its supervisor starts another one.",
                self._echo.kill,
            )
        yield DemoFault(
            "cut-sessions",
            "Cut all sessions",
            "The chat server aborts every link, without a reason.",
            self._chat.cut,
            self._missing_sessions,
            healed=lambda: not self.load.missing_sessions(),
            impossible=self._no_session,
        )
        yield DemoFault(
            "take-over",
            "Sign in elsewhere",
            "Another client signs in to one account, so its session goes offline and does not "
            f"reconnect. The demo signs in again after {SIGN_IN_AFTER:g} s.",
            lambda: self._chat.take_over(random.choice(self._chat.online)),
            self._missing_sessions,
            healed=lambda: not self.load.missing_sessions(),
            impossible=self._no_session,
        )

    async def _kill_backends(self) -> None:
        self._discards.begin()
        async with await psycopg.AsyncConnection.connect(self._server.url, autocommit=True) as conn:
            await conn.execute(KILL_BACKENDS, [POOL])

    async def _expire_pool(self) -> None:
        self._discards.begin()
        await self._db.drain()

    def _direct_path_is_down(self) -> bool:
        """Whether change stream and listener have both noticed the silence.

        The proxy resets their connections when the black hole ends, so an earlier end would be
        noticed as a reset.
        """
        listener = self._pg.listener
        return listener is not None and not listener.up and self._pg.health.http != 200

    def _no_session(self) -> str | None:
        return None if self._chat.online else "no session is online"

    def _missing_sessions(self) -> str | None:
        missing = self.load.missing_sessions()
        return f"{counted(missing, 'session')} not online" if missing else None


class Discards:
    """The connections that a pool has discarded since the last `begin()`."""

    def __init__(self, pool: AsyncConnectionPool[Any]) -> None:
        self._pool = pool
        self._before = 0

    def begin(self) -> None:
        """Count only the connections that are discarded from now on."""
        self._before += self._number()

    def noticed(self) -> str | None:
        """Return what the pool has discarded, or None."""
        number = self._number()
        return f"the pool has discarded {counted(number, 'connection')}" if number else None

    def replaced(self) -> bool:
        """Whether the pool has discarded connections and is full again."""
        now = self._pool.statistics()
        return self._number() > 0 and now.size + now.in_use >= now.target

    def _number(self) -> int:
        return sum(self._pool.statistics().discards.values()) - self._before
