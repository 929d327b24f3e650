"""The public classes of the embedded server: for asyncio, and for threads and plain fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from moored.embedded._server import Ended, Server
from moored.kernel import in_thread, patiently

__all__ = ["EmbeddedPostgres", "SyncEmbeddedPostgres"]


class SyncEmbeddedPostgres(Server):
    """A real PostgreSQL under this process, for threads and plain fixtures.

    It takes the same arguments as `EmbeddedPostgres`; `on_progress` is called from any thread.
    """

    def start(self) -> None:
        """Start the server, creating missing data; return when it accepts connections."""
        self._start()

    def stop(self) -> None:
        """Stop the server: fast shutdown, immediate shutdown, SIGKILL; remove temporary data."""
        self._stop()

    def restart(self) -> None:
        """Stop the server and start it again, on the same port and with the same data."""
        self._restart()

    def kill(self) -> None:
        """End the server by SIGKILL; return when none of its processes is left. The data stay."""
        self._kill()

    def wait_ended(self, timeout: float | None = None) -> Ended | None:
        """Wait until the server has ended, for any reason; return None after the timeout."""
        run = self._last_run()
        return self._ended(run) if run.wait_ended(timeout) else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class EmbeddedPostgres(Server):
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
    - `on_progress` is called on the loop with a sentence about each step of a start or a stop.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the server, creating missing data; return when it accepts connections.

        When it is cancelled, it leaves nothing running.
        """
        await self._or_nothing(self._start)

    async def stop(self) -> None:
        """Stop the server: fast shutdown, immediate shutdown, SIGKILL; remove temporary data.

        When it is cancelled, it still returns only when the server has ended.
        """
        await self._call(self._stop)

    async def restart(self) -> None:
        """Stop the server and start it again, on the same port and with the same data."""
        await self._or_nothing(self._restart)

    async def kill(self) -> None:
        """End the server by SIGKILL; return when none of its processes is left. The data stay."""
        await self._call(self._kill)

    async def wait_ended(self) -> Ended:
        """Wait until the server has ended, for any reason."""
        run, ended, loop = self._last_run(), asyncio.Event(), asyncio.get_running_loop()
        forget = run.when_ended(lambda: _post(loop, ended.set))
        try:
            await ended.wait()
        finally:
            forget()
        return self._ended(run)

    async def _or_nothing(self, start: Callable[[], None]) -> None:
        try:
            await self._call(start, self._interrupted.set)
        except asyncio.CancelledError:
            # The server may have become ready just before the start was interrupted.
            await self._call(self._stop)
            raise

    async def _call(
        self, work: Callable[[], None], interrupt: Callable[[], None] = lambda: None
    ) -> None:
        # A thread of its own: the loop's shared ones may all be busy just when the server must end.
        self._loop = asyncio.get_running_loop()
        future = in_thread(work, name="moored-embedded-call")
        try:
            await patiently(future, interrupt)
        finally:
            future.exception()  # retrieved, also when the caller was cancelled
        future.result()

    def _notify(self, text: str) -> None:
        if self._on_progress is not None and self._loop is not None:
            _post(self._loop, self._on_progress, text)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        pass  # the loop is closed, so nothing waits for the call
