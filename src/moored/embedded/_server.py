"""The server itself: started, watched and ended, in plain synchronous code.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moored.embedded._config import Config
from moored.embedded._database import ensure_database
from moored.embedded._directory import Directory
from moored.embedded._errors import EmbeddedError
from moored.embedded._guarded import Guarded
from moored.embedded._launch import SETTLE, Launch, Launched

__all__ = ["Ended", "Server", "State"]

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
    """One server and its directory; every method may be called from any thread."""

    def __init__(self, directory: Directory, config: Config, notify: Callable[[str], None]) -> None:
        self.directory = directory
        self.config = config
        self.notify = notify
        #: Stays the same once chosen, so that clients find the server again.
        self.port = config.first_port
        self._state: State = "stopped"
        self._launched: Launched | None = None
        self._asked_to_end = False
        self._busy = threading.RLock()
        self._interrupted = threading.Event()
        self._owner = os.getpid()

    @property
    def launched(self) -> Launched | None:
        """What the last start brought."""
        return self._launched

    @property
    def state(self) -> State:
        """What it is doing."""
        return "ended" if self._state == "running" and self.run is None else self._state

    @property
    def run(self) -> Guarded | None:
        """The running server, or None."""
        run = self._launched.run if self._launched else None
        return None if run is None or run.ended else run

    @property
    def password(self) -> str:
        """The password of its user."""
        if self._launched is None:
            raise EmbeddedError("the server has not been started, so it has no address yet")
        return self._launched.password

    def url(self, database: str | None = None) -> str:
        """How to reach it, with the password."""
        return self.config.url(self.port, self.password, database)

    def start(self) -> None:
        """Start it, making its data first if there are none; returns when it takes connections."""
        with self._busy:
            self._must_be_mine()
            if self.run is not None:
                raise EmbeddedError(f"the server is {self.state} already (pid {self.run.pid})")
            self._interrupted.clear()
            self._state = "starting"
            try:
                self._start()
            except BaseException:
                self._state = "stopped"
                raise
            self._state = "running"

    def _start(self) -> None:
        began = time.monotonic()
        fresh = not self.directory.made
        launch = Launch(self.directory, self.config, self.notify, self._interrupted)
        try:
            self._launched = launch.start(self.port)
            self.port = self._launched.port
            self._asked_to_end = False
            ensure_database(self.url("postgres"), self.config.database)
        except BaseException:
            self._kill()
            if fresh:
                self.directory.remove()
            raise
        self.notify(f"ready after {time.monotonic() - began:.1f} s")

    def stop(self) -> None:
        """End it: fast, then immediately, then by force; a temporary directory goes too."""
        if os.getpid() != self._owner:
            return  # a fork's copy, for example at the end of a `with`: not its server to stop
        with self._busy:
            self._stop()
            self.directory.remove()

    def restart(self) -> None:
        """Stop it and start it again, on the same port and with the same data."""
        self._must_be_mine()
        with self._busy:
            self._stop()
            self.start()

    def kill(self) -> None:
        """End it by SIGKILL, and return when nothing of it is left; its data stays."""
        self._must_be_mine()
        with self._busy:
            self._kill()

    def interrupt(self) -> None:
        """Make a start that is under way in another thread give up."""
        self._interrupted.set()

    def wait_ended(self, timeout: float | None = None) -> Ended | None:
        """Wait until the server has ended, for whatever reason; None when the time is over."""
        run = self._last_run()
        return self._ended(run) if run.wait_ended(timeout) else None

    def when_ended(self, call: Callable[[Ended], None]) -> Callable[[], None]:
        """Have `call` told of the end, once, from any thread; returns how to cancel that."""
        run = self._last_run()
        return run.when_ended(lambda: call(self._ended(run)))

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

    def _stop(self) -> None:
        grace = self.config.grace
        if run := self.run:
            self._state, self._asked_to_end = "stopping", True
            run.stop(grace)
            self._await_end(run, grace.fast + grace.immediate + SETTLE)
        self._state = "stopped"

    def _kill(self) -> None:
        if run := self.run:
            self._asked_to_end = True
            run.kill()
            self._await_end(run, SETTLE)

    def _await_end(self, run: Guarded, patience: float) -> None:
        if not run.wait_ended(patience):
            raise EmbeddedError(
                f"the server (pid {run.pid}) has not ended within {patience:.0f} s, "
                "though it was sent SIGKILL: it hangs in the kernel, perhaps on its disk",
                log=self.directory.log_tail(),
            )
