"""The server: started, watched and ended by synchronous code that any thread may call.

::

    stopped ──start──▶ starting ──ready──▶ running ──stop──▶ stopping ──▶ stopped
                          │                   │
                          │                   └─ it ended by itself, or was killed ─▶ ended
                          └─ the start failed ─▶ stopped
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ._database import ensure_database
from ._directory import Directory
from ._errors import EmbeddedError
from ._guarded import Guarded
from ._launch import SETTLE, Launch, Launched
from ._options import HOST, KILL_TIMEOUT, ServerOptions

__all__ = ["Ended", "Server", "State"]

PathLike = str | os.PathLike[str]
State = Literal["stopped", "starting", "running", "stopping", "ended"]


@dataclass(frozen=True)
class Ended:
    """How a server ended."""

    #: The exit status of the first process; negative: a signal; None: the guard was killed.
    status: int | None
    #: Whether the owner has stopped or killed it.
    expected: bool

    def __str__(self) -> str:
        how = "as requested" if self.expected else "by itself"
        if self.status is None:
            return f"the server ended {how}, after its guard was killed"
        if self.status < 0:
            return f"the server ended {how}, by {signal.Signals(-self.status).name}"
        return f"the server ended {how}, with status {self.status}"


class Server:
    """One server and its directory: the common base of the classes for asyncio and threads."""

    def __init__(
        self,
        data_dir: PathLike | None = None,
        *,
        version: int | None = None,
        bin_dir: PathLike | None = None,
        port: int = 0,
        socket_dir: PathLike | None = None,
        database: str = "postgres",
        user: str = "postgres",
        password: str | None = None,
        options: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 30.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._options = ServerOptions(
            version=version,
            bin_dir=None if bin_dir is None else Path(bin_dir),
            port=port,
            socket_dir=None if socket_dir is None else Path(socket_dir).absolute(),
            database=database,
            user=user,
            password=password,
            options=dict(options or {}),
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
            temporary=data_dir is None,
        )
        self._on_progress = on_progress
        self._directory = Directory(data_dir)
        #: Kept once it is chosen, so that clients find the server again.
        self._port = self._options.first_port
        self._state: State = "stopped"
        self._launched: Launched | None = None
        self._end_requested = False
        self._busy = threading.RLock()
        self._interrupted = threading.Event()
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """The URL of the database, with the password: a secret."""
        return self.url_of(self._options.database)

    def url_of(self, database: str) -> str:
        """Return the URL of another database of this server, with the password: a secret."""
        return self._options.url(self._port, self.password, database)

    @property
    def port(self) -> int:
        """The port of the server; 0 before the first start, if a free one is to be chosen."""
        return self._port

    @property
    def host(self) -> str:
        """The address that the server listens on, or the directory of its socket."""
        return str(self._options.socket_dir or HOST)

    @property
    def user(self) -> str:
        """The name of the superuser."""
        return self._options.user

    @property
    def password(self) -> str:
        """The password of the superuser: a secret."""
        if self._launched is None:
            raise EmbeddedError("the server has not been started, so it has no password yet")
        return self._launched.password

    @property
    def data_dir(self) -> Path:
        """The directory of the data, the password and the log."""
        return self._directory.path

    @property
    def bin_dir(self) -> Path | None:
        """The directory of the server's programs (psql, pg_dump …); None before the first start."""
        return self._launched.binaries.bin_dir if self._launched else None

    @property
    def version(self) -> str | None:
        """The version of the server, for example "18.4"; None before the first start."""
        return self._launched.binaries.version if self._launched else None

    @property
    def state(self) -> State:
        """One of stopped, starting, running, stopping, and ended (by itself, or killed)."""
        return "ended" if self._state == "running" and self._run is None else self._state

    @property
    def running(self) -> bool:
        """Whether the server accepts connections."""
        return self.state == "running"

    @property
    def pid(self) -> int | None:
        """The pid of the server's first process, while it runs."""
        run = self._run
        return run.pid if run else None

    @property
    def guard_pid(self) -> int | None:
        """The pid of the guard process that ends the server when this process dies."""
        run = self._run
        return run.guard_pid if run else None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        return self._directory.log_tail(lines)

    def __repr__(self) -> str:
        parts = [f"PostgreSQL {self.version}"] if self.version else []
        parts.append(self.state)
        if self._port:
            parts.append(f"at {self._options.where(self._port)}")
        if (pid := self.pid) is not None:
            parts.append(f"pid {pid}")
        kind = "temporary data" if self._directory.temporary else "data"
        parts.append(f"{kind} in {self._directory.path}" if self._directory.made else kind)
        return f"<{type(self).__name__} {', '.join(parts)}>"

    @property
    def _run(self) -> Guarded | None:
        run = self._launched.run if self._launched else None
        return None if run is None or run.ended else run

    def _notify(self, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(text)

    def _start(self) -> None:
        """Start the server, creating missing data; return when it accepts connections."""
        with self._busy:
            self._check_process()
            if self._run is not None:
                raise EmbeddedError(f"the server is {self.state} already (pid {self._run.pid})")
            self._interrupted.clear()
            self._state = "starting"
            try:
                self._launch()
            except BaseException:
                self._state = "stopped"
                raise
            self._state = "running"

    def _launch(self) -> None:
        began = time.monotonic()
        fresh = not self._directory.made
        launch = Launch(self._directory, self._options, self._notify, self._interrupted)
        try:
            self._launched = launch.start(self._port)
            self._port = self._launched.port
            self._end_requested = False
            ensure_database(self.url_of("postgres"), self._options.database)
        except BaseException:
            self._end_now()
            if fresh:
                self._directory.remove()
            raise
        self._notify(f"ready after {time.monotonic() - began:.1f} s")

    def _stop(self) -> None:
        """Stop the server: fast shutdown, immediate shutdown, SIGKILL; remove temporary data."""
        if os.getpid() != self._owner:
            return  # a copy in a forked process, for example at the end of a `with`
        with self._busy:
            self._shut_down()
            self._directory.remove()

    def _restart(self) -> None:
        """Stop the server and start it again, on the same port and with the same data."""
        self._check_process()
        with self._busy:
            self._shut_down()
            self._start()

    def _kill(self) -> None:
        """End the server by SIGKILL; return when none of its processes is left. The data stay."""
        self._check_process()
        with self._busy:
            self._end_now()

    def _last_run(self) -> Guarded:
        if self._launched is None:
            raise EmbeddedError("the server has not been started, so it cannot end")
        return self._launched.run

    def _ended(self, run: Guarded) -> Ended:
        return Ended(status=run.status, expected=self._end_requested)

    def _check_process(self) -> None:
        if os.getpid() != self._owner:
            raise EmbeddedError(
                f"the server belongs to process {self._owner}, and this is process {os.getpid()}, "
                "a fork of it: only the owner can start or stop the server; connect to its url"
            )

    def _shut_down(self) -> None:
        if run := self._run:
            self._state, self._end_requested = "stopping", True
            run.stop()
            self._await_end(run, self._options.stop_timeout + KILL_TIMEOUT + SETTLE)
        self._state = "stopped"

    def _end_now(self) -> None:
        if run := self._run:
            self._end_requested = True
            run.kill()
            self._await_end(run, SETTLE)

    def _await_end(self, run: Guarded, timeout: float) -> None:
        if not run.wait_ended(timeout):
            raise EmbeddedError(
                f"the server (pid {run.pid}) has not ended within {timeout:.0f} s, "
                "although it was sent SIGKILL: it hangs in the kernel, perhaps on its disk",
                log=self._directory.log_tail(),
            )
