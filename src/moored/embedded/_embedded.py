"""The two faces of the embedded server: for asyncio, and for threads and plain fixtures."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from moored.embedded._config import Config
from moored.embedded._directory import Directory
from moored.embedded._guarded import Grace
from moored.embedded._server import Ended, Server, State

__all__ = ["EmbeddedPostgres", "SyncEmbeddedPostgres"]

T = TypeVar("T")
PathLike = str | os.PathLike[str]


class _Face:
    """What both faces know and tell."""

    def __init__(
        self,
        data_dir: PathLike | None = None,
        *,
        version: int | None = None,
        bin_dir: PathLike | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        socket_dir: PathLike | None = None,
        database: str = "postgres",
        user: str = "postgres",
        password: str | None = None,
        options: Mapping[str, str] | None = None,
        run_as: str | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 30.0,
        kill_timeout: float = 10.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        config = Config(
            version=version,
            bin_dir=None if bin_dir is None else Path(bin_dir),
            host=host,
            port=port,
            socket_dir=None if socket_dir is None else Path(socket_dir).absolute(),
            database=database,
            user=user,
            password=password,
            options=dict(options or {}),
            run_as=run_as,
            start_timeout=start_timeout,
            grace=Grace(fast=stop_timeout, immediate=kill_timeout),
        )
        self._on_progress = on_progress
        self._server = Server(Directory(data_dir), config, self._notify)

    @property
    def url(self) -> str:
        """How to reach it, with the password: a secret."""
        return self._server.url()

    def url_of(self, database: str) -> str:
        """How to reach another database of this server."""
        return self._server.url(database)

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before the first start, if a free one is to be taken."""
        return self._server.port

    @property
    def host(self) -> str:
        """The address that it listens on, or the directory of its socket."""
        return str(self._server.config.socket_dir or self._server.config.host)

    @property
    def user(self) -> str:
        """The superuser."""
        return self._server.config.user

    @property
    def password(self) -> str:
        """Its password: a secret."""
        return self._server.password

    @property
    def data_dir(self) -> Path:
        """The directory that holds its data, its password and its log."""
        return self._server.directory.path

    @property
    def bin_dir(self) -> Path | None:
        """Where its programs are (psql, pg_dump …), once it has been started."""
        launched = self._server.launched
        return launched.binaries.bin_dir if launched else None

    @property
    def version(self) -> str | None:
        """Its version, for example "18.4", once it has been started."""
        launched = self._server.launched
        return launched.binaries.version if launched else None

    @property
    def state(self) -> State:
        """One of stopped, starting, running, stopping, and ended (by itself, or killed)."""
        return self._server.state

    @property
    def running(self) -> bool:
        """Whether it takes connections."""
        return self._server.state == "running"

    @property
    def pid(self) -> int | None:
        """The number of the server's first process, while it runs."""
        run = self._server.run
        return run.pid if run else None

    @property
    def guard_pid(self) -> int | None:
        """The number of the process that ends the server when this one dies, while it runs."""
        run = self._server.run
        return run.guard_pid if run else None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log."""
        return self._server.directory.log_tail(lines)

    def _notify(self, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(text)

    def __repr__(self) -> str:
        server = self._server
        parts = [f"PostgreSQL {self.version}"] if self.version else []
        parts.append(server.state)
        if server.port:
            parts.append(f"at {server.config.where(server.port)}")
        if server.run:
            parts.append(f"pid {server.run.pid}")
        kind = "temporary data" if server.directory.temporary else "data"
        parts.append(f"{kind} in {server.directory.path}" if server.directory.made else kind)
        return f"<{type(self).__name__} {', '.join(parts)}>"


class SyncEmbeddedPostgres(_Face):
    """A real PostgreSQL under this process, for threads and plain fixtures.

    It takes what `EmbeddedPostgres` takes; `on_progress` is called from any thread.
    """

    def start(self) -> None:
        """Start it, making its data first if there are none; returns when it takes connections."""
        self._server.start()

    def stop(self) -> None:
        """End it: fast, then immediately, then by force; a temporary directory goes too."""
        self._server.stop()

    def restart(self) -> None:
        """Stop it and start it again, on the same port and with the same data."""
        self._server.restart()

    def kill(self) -> None:
        """End it by SIGKILL, and return when nothing of it is left; its data stays."""
        self._server.kill()

    def wait_ended(self, timeout: float | None = None) -> Ended | None:
        """Wait until it has ended, for whatever reason; None when the time is over."""
        return self._server.wait_ended(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class EmbeddedPostgres(_Face):
    """A real PostgreSQL under this process, for asyncio.

    - `data_dir` holds the data, the password and the log from one start to the next. Without one
      the server is temporary: its directory is removed when it is stopped, and it does not sync to
      disk.
    - `version` is the major version of the wheel's PostgreSQL to run. Without one the data decide,
      and new data are made by the newest.
    - `bin_dir` names the programs of an installed PostgreSQL, to run that instead of the wheel's.
    - `host` is the loopback address to listen on, and `port` the port there; 0 takes a free one at
      the first start and keeps it, so that clients find the server again after a restart.
    - `socket_dir` is the directory of a Unix socket, to listen there instead of on a port.
    - `database` is where `url` leads; it is made when it is missing.
    - `user` is the superuser that the data are made with, and `password` that user's password. A
      random one is made without it and kept in `data_dir`, in the file `pgpass`; give it for data
      that were made elsewhere.
    - `options` are settings of PostgreSQL. They count for more than Moored's defaults
      (`wal_level = logical`, among others) and for less than `ALTER SYSTEM`.
    - `run_as` is the user that root runs the server as, because PostgreSQL refuses root. Without
      one it is the owner of the data, and for new data `nobody`, who exists everywhere.
    - `start_timeout` is how long a start may take, with the recovery after a crash.
    - `stop_timeout` is how long a fast shutdown may take before an immediate one follows, and
      `kill_timeout` how long that may take before SIGKILL follows.
    - `on_progress` is told in a sentence what a start or a stop is doing, on the loop.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start it, making its data first if there are none; returns when it takes connections.

        Cancelled, it leaves nothing running.
        """
        await self._or_nothing(self._server.start)

    async def stop(self) -> None:
        """End it: fast, then immediately, then by force; a temporary directory goes too.

        Cancelled, it still returns only when the server has ended.
        """
        await self._in_thread(self._server.stop)

    async def restart(self) -> None:
        """Stop it and start it again, on the same port and with the same data."""
        await self._or_nothing(self._server.restart)

    async def kill(self) -> None:
        """End it by SIGKILL, and return when nothing of it is left; its data stays."""
        await self._in_thread(self._server.kill)

    async def wait_ended(self) -> Ended:
        """Wait until it has ended, for whatever reason."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ended] = loop.create_future()

        def tell(ended: Ended) -> None:
            _call(loop, lambda: None if future.done() else future.set_result(ended))

        cancel = self._server.when_ended(tell)
        try:
            return await future
        finally:
            cancel()

    async def _or_nothing(self, start: Callable[[], None]) -> None:
        try:
            await self._in_thread(start, self._server.interrupt)
        except asyncio.CancelledError:
            # It may have been ready just before it was told to give up.
            await self._in_thread(self._server.stop)
            raise

    async def _in_thread(
        self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None
    ) -> T:
        # A thread of its own: the loop's shared ones may all be busy just when the server must end.
        self._loop = loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                failure = error
                _call(loop, lambda: future.set_exception(failure))
            else:
                _call(loop, lambda: future.set_result(result))

        threading.Thread(target=run, name="moored-embedded-call", daemon=True).start()
        return await _to_the_end(future, interrupt)

    def _notify(self, text: str) -> None:
        if self._on_progress is not None and self._loop is not None:
            told = self._on_progress
            _call(self._loop, lambda: told(text))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


async def _to_the_end(future: asyncio.Future[T], interrupt: Callable[[], None]) -> T:
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            interrupt()
    if cancelled is None:
        return future.result()
    future.exception()
    raise cancelled


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass  # the loop is closed, so nobody waits any more
