"""The server itself: started, watched and ended, in synchronous code that any thread may call.

::

    stopped ──start──▶ starting ──ready──▶ running ──stop──▶ stopping ──▶ stopped
                          │                   │
                          │                   └─ it ended by itself, or was killed ─▶ ended
                          └─ it could not ─▶ stopped
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

from moored.embedded._database import ensure_database
from moored.embedded._directory import Directory
from moored.embedded._errors import EmbeddedError
from moored.embedded._guarded import Grace, Guarded
from moored.embedded._launch import SETTLE, Launch, Launched
from moored.embedded._options import ServerOptions

__all__ = ["Ended", "Server", "State"]

PathLike = str | os.PathLike[str]
State = Literal["stopped", "starting", "running", "stopping", "ended"]


@dataclass(frozen=True)
class Ended:
    """How a server ended."""

    #: The exit status of its first process; negative: the signal; None: its guard was killed.
    status: int | None
    #: Whether it was asked to end.
    expected: bool

    def __str__(self) -> str:
        asked = "as asked" if self.expected else "by itself"
        if self.status is None:
            return f"the server ended {asked}, after its guard was killed"
        if self.status < 0:
            return f"the server ended {asked}, by {signal.Signals(-self.status).name}"
        return f"the server ended {asked}, with status {self.status}"


class Server:
    """One server and its directory: everything that does not depend on asyncio or threads."""

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
        self._options = ServerOptions(
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
        self._directory = Directory(data_dir)
        #: Stays the same once chosen, so that clients find the server again.
        self._port = self._options.first_port
        self._state: State = "stopped"
        self._launched: Launched | None = None
        self._asked_to_end = False
        self._busy = threading.RLock()
        self._interrupted = threading.Event()
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """The URL of the database, with the password: a secret."""
        return self.url_of(self._options.database)

    def url_of(self, database: str) -> str:
        """The URL of another database of this server, with the password: a secret."""
        return self._options.url(self._port, self.password, database)

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before the first start, if a free one is to be taken."""
        return self._port

    @property
    def host(self) -> str:
        """The address that it listens on, or the directory of its socket."""
        return str(self._options.socket_dir or self._options.host)

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
        """The directory that holds its data, its password and its log."""
        return self._directory.path

    @property
    def bin_dir(self) -> Path | None:
        """The directory of its programs (psql, pg_dump …), once it has been started."""
        return self._launched.binaries.bin_dir if self._launched else None

    @property
    def version(self) -> str | None:
        """Its version, for example "18.4", once it has been started."""
        return self._launched.binaries.version if self._launched else None

    @property
    def state(self) -> State:
        """One of stopped, starting, running, stopping, and ended (by itself, or killed)."""
        return "ended" if self._state == "running" and self._run is None else self._state

    @property
    def running(self) -> bool:
        """Whether it accepts connections."""
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
        """The last lines of the server's log."""
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
        """Start the server, creating its data if there are none."""
        with self._busy:
            self._must_be_mine()
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
            self._asked_to_end = False
            ensure_database(self.url_of("postgres"), self._options.database)
        except BaseException:
            self._end_now()
            if fresh:
                self._directory.remove()
            raise
        self._notify(f"ready after {time.monotonic() - began:.1f} s")

    def _stop(self) -> None:
        """Stop the server, and remove a temporary directory."""
        if os.getpid() != self._owner:
            return  # a fork's copy, for example at the end of a `with`: not its server to stop
        with self._busy:
            self._shut_down()
            self._directory.remove()

    def _restart(self) -> None:
        """Stop the server and start it again, on the same port and with the same data."""
        self._must_be_mine()
        with self._busy:
            self._shut_down()
            self._start()

    def _kill(self) -> None:
        """End the server by SIGKILL; return when none of its processes is left."""
        self._must_be_mine()
        with self._busy:
            self._end_now()

    def _last_run(self) -> Guarded:
        if self._launched is None:
            raise EmbeddedError("the server has not been started, so it cannot end")
        return self._launched.run

    def _ended(self, run: Guarded) -> Ended:
        return Ended(status=run.status, expected=self._asked_to_end)

    def _must_be_mine(self) -> None:
        if os.getpid() != self._owner:
            raise EmbeddedError(
                f"the server belongs to process {self._owner}, and this is process {os.getpid()}, "
                "a fork of it: only that one can start or end it; connect to it by its url"
            )

    def _shut_down(self) -> None:
        grace = self._options.grace
        if run := self._run:
            self._state, self._asked_to_end = "stopping", True
            run.stop(grace)
            self._await_end(run, grace.fast + grace.immediate + SETTLE)
        self._state = "stopped"

    def _end_now(self) -> None:
        if run := self._run:
            self._asked_to_end = True
            run.kill()
            self._await_end(run, SETTLE)

    def _await_end(self, run: Guarded, patience: float) -> None:
        if not run.wait_ended(patience):
            raise EmbeddedError(
                f"the server (pid {run.pid}) has not ended within {patience:.0f} s, "
                "though it was sent SIGKILL: it hangs in the kernel, perhaps on its disk",
                log=self._directory.log_tail(),
            )
