"""The public classes of the embedded server: for asyncio, and for threads and plain fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from moored.kernel import in_thread, patiently

from ._server import Ended, Server

__all__ = ["EmbeddedPostgres", "SyncEmbeddedPostgres"]


class SyncEmbeddedPostgres(Server):
    """A real PostgreSQL under this process, for threads and plain fixtures.

    It takes the same arguments as `EmbeddedPostgres`; `on_progress` is called from any thread.
    """

    start = Server._start
    stop = Server._stop
    restart = Server._restart
    kill = Server._kill

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

    - `data_dir` is the directory of the data, the password and the log. Without one the server is
      temporary: its directory is removed when it is stopped, and it does not sync to disk.
    - `version` is the major version of the wheel's PostgreSQL to run. The default is the version of
      the data, and for new data the newest.
    - `bin_dir` is the bin directory of an installed PostgreSQL, to run that instead of the wheel's.
    - `port` is the port on 127.0.0.1; 0 chooses a free one at the first start and keeps it, so that
      clients find the server again after a restart.
    - `socket_dir` is the directory of a Unix socket, to listen there instead of on a port.
    - `database` is the database of `url`; it is created if it is missing.
    - `user` is the superuser that the data are created with, and `password` that user's password.
      The default is a random one, stored in the file `pgpass` in `data_dir`; pass it for data that
      were created elsewhere.
    - `options` are settings of PostgreSQL. They override Moored's defaults (`wal_level = logical`,
      among others), and `ALTER SYSTEM` overrides them.
    - `start_timeout` limits a start, including the recovery after a crash.
    - `stop_timeout` limits a fast shutdown, after which an immediate one follows, and 10 s later
      SIGKILL.
    - `on_progress` is called on the loop with a sentence about each step of a start or a stop.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the server, creating missing data; return when it accepts connections.

        If it is cancelled, it stops the server before it raises.
        """
        await self._start_or_stop(self._start)

    async def stop(self) -> None:
        """Stop the server: fast shutdown, immediate shutdown, SIGKILL; remove temporary data.

        If it is cancelled, it raises when the server has ended.
        """
        await self._call(self._stop)

    async def restart(self) -> None:
        """Stop the server and start it again, on the same port and with the same data."""
        await self._start_or_stop(self._restart)

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

    async def _start_or_stop(self, start: Callable[[], None]) -> None:
        try:
            await self._call(start, self._interrupted.set)
        except asyncio.CancelledError:
            # The server may have become ready just before the start was interrupted.
            await self._call(self._stop)
            raise

    async def _call(
        self, work: Callable[[], None], interrupt: Callable[[], None] = lambda: None
    ) -> None:
        # A thread of its own: the loop's executor may be busy when the server must end.
        self._loop = asyncio.get_running_loop()
        future = in_thread(work, name="moored-embedded-call")
        try:
            await patiently(future, interrupt)
        finally:
            future.exception()  # marks the error as retrieved, also if the caller was cancelled
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
