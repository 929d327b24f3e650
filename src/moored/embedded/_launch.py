"""One start of the server: from whatever the directory holds to a server that takes connections."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moored.embedded import _guard
from moored.embedded._account import Account
from moored.embedded._binaries import Binaries
from moored.embedded._cluster import Cluster
from moored.embedded._descriptors import OwnedDescriptor
from moored.embedded._directory import Directory
from moored.embedded._errors import DataDirectoryInUse, EmbeddedError, PortInUse
from moored.embedded._files import read_file
from moored.embedded._guarded import Guarded
from moored.embedded._lock import take, wait_free
from moored.embedded._options import ServerOptions
from moored.embedded._ports import choose_port
from moored.embedded._reach import reachable

__all__ = ["SETTLE", "Launch", "Launched"]

#: Seconds that the last of a server may need to vanish once it has been told to.
SETTLE = 15.0

_TICK = 0.01
_NEWS = 5.0
_PORT_ATTEMPTS = 5
_PORT_TAKEN = "Address already in use"
_OTHER_SERVER = re.compile(r"\(PID (\d+)\) running in data directory")


@dataclass(frozen=True)
class Launched:
    """A server that takes connections."""

    run: Guarded
    binaries: Binaries
    port: int
    password: str


class Launch:
    """One start; it either returns a running server or leaves nothing running."""

    def __init__(
        self,
        directory: Directory,
        options: ServerOptions,
        notify: Callable[[str], None],
        interrupted: threading.Event,
    ) -> None:
        self._directory = directory
        self._options = options
        self._notify = notify
        self._interrupted = interrupted
        self._began = time.monotonic()
        self._news_due = self._began + _NEWS
        self._log_since = 0

    def start(self, port: int) -> Launched:
        """Start on that port, or on a free one where it is 0."""
        try:
            return self._start(port)
        except OSError as error:
            where = self._directory.path if self._directory.made else "a temporary directory"
            raise EmbeddedError(f"the server cannot be started in {where}: {error}") from error

    def _start(self, port: int) -> Launched:
        new = self._directory.make()
        lock = take(self._directory.path, SETTLE)
        try:
            cluster = self._cluster(lock, new=new)
            self._log_since = self._directory.log_size()
            run, port = self._listen(cluster, lock, port)
        finally:
            # From here on the server's own copy is what holds the directory.
            lock.close()
        return Launched(run, cluster.binaries, port, cluster.password())

    def _cluster(self, lock: OwnedDescriptor, *, new: bool) -> Cluster:
        account = Account.choose(self._directory, self._options.run_as)
        binaries = reachable(self._binaries(), account, self._notify)
        cluster = Cluster(self._directory, self._options, account, binaries)
        if new:
            cluster.let_through(self._directory.path)
        if self._directory.major is None:
            self._notify(f"making the data directory {self._directory.data} ({binaries})")
            cluster.create(lock, self._await_end)
        cluster.check_version()
        cluster.password()
        cluster.adopt(self._notify)
        cluster.configure()
        return cluster

    def _binaries(self) -> Binaries:
        if self._options.bin_dir is not None:
            return Binaries.at(self._options.bin_dir)
        return Binaries.from_wheel(self._options.version or self._directory.major)

    def _listen(
        self,
        cluster: Cluster,
        lock: OwnedDescriptor,
        port: int,
        attempts: int = _PORT_ATTEMPTS,
    ) -> tuple[Guarded, int]:
        chosen = port or choose_port(self._options.host)
        try:
            return self._run(cluster, lock, chosen), chosen
        except PortInUse:
            if port or attempts == 1:
                raise
        return self._listen(cluster, lock, port, attempts - 1)

    def _run(self, cluster: Cluster, lock: OwnedDescriptor, port: int) -> Guarded:
        where = self._options.where(port)
        crashed = os.path.lexists(self._directory.data / "postmaster.pid")
        self._forget_reused_pid()
        recovering = ", recovering after a crash" if crashed else ""
        self._notify(f"starting {cluster.binaries} on {where}{recovering}")
        run = cluster.guarded(
            cluster.postgres(port),
            self._directory.data,
            lock,
            on_stopping=self._stopping,
            settle=lambda: None if lock.open else wait_free(self._directory.path, SETTLE),
        )
        try:
            self._await_ready(run, where)
        except BaseException:
            run.kill()
            run.wait_ended(SETTLE)
            raise
        return run

    def _forget_reused_pid(self) -> None:
        """Remove the pid file of a dead server if its number belongs to another process by now.

        PostgreSQL would refuse to start. Nothing of the old server can be left: everything that it
        started inherits the lock of the directory, which is ours. A server that another program has
        started there has the data directory as its working directory.
        """
        file = self._directory.data / "postmaster.pid"
        try:
            pid = int(read_file(file).partition("\n")[0])
            program = Path(f"/proc/{pid}/comm").read_text().strip()
            serves = os.path.samefile(f"/proc/{pid}/cwd", self._directory.data)
        except (OSError, ValueError):
            return
        if not serves:
            self._notify(
                f"the pid {pid} of the last server belongs to another process now ({program}): "
                "its pid file is removed"
            )
            _guard.release_memory(str(self._directory.path))
            file.unlink()

    def _await_ready(self, run: Guarded, where: str) -> None:
        while not self._ready(run):
            if run.wait_ended(_TICK):
                raise self._why(run, where)
            self._check_patience()

    def _await_end(self, run: Guarded) -> None:
        try:
            while not run.wait_ended(_TICK):
                self._check_patience()
        except BaseException:
            run.kill()
            run.wait_ended(SETTLE)
            raise

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._began
        if self._interrupted.is_set():
            raise EmbeddedError("the start was interrupted")
        if waited >= self._options.start_timeout:
            raise EmbeddedError(
                f"the server was not ready within start_timeout={self._options.start_timeout} s "
                "(the recovery of much data may need longer)",
                log=self._log(),
            )
        if time.monotonic() >= self._news_due:
            self._news_due += _NEWS
            last = (self._log().splitlines() or ["nothing in its log"])[-1]
            self._notify(f"still starting after {waited:.0f} s: {last}")

    def _ready(self, run: Guarded) -> bool:
        # The server's own word for it. A file left by a crash has another pid on its first line.
        try:
            lines = read_file(self._directory.data / "postmaster.pid").splitlines()
        except OSError:
            return False
        pid, status = (lines[0], lines[7]) if len(lines) >= 8 else ("", "")
        return pid.strip() == str(run.pid) and status.strip() in ("ready", "standby")

    def _why(self, run: Guarded, where: str) -> EmbeddedError:
        log = self._log()
        if _PORT_TAKEN in log:
            return PortInUse(
                f"cannot listen on {where}: the port is in use; stop the other program, or choose "
                "another port (port=0 takes a free one)",
                log=log,
            )
        if other := _OTHER_SERVER.search(log):
            pid = int(other[1])
            return DataDirectoryInUse(
                f"the data directory {self._directory.data} is in use by another PostgreSQL, "
                f"process {pid}: stop that one, or name another data_dir",
                pid=pid,
            )
        return EmbeddedError(f"the server ended with status {run.status} as it started", log=log)

    def _log(self) -> str:
        return self._directory.log_tail(since=self._log_since)

    def _stopping(self, name: str) -> None:
        words = {
            "SIGINT": "stopping the server (fast shutdown)",
            "SIGQUIT": "the server has not ended: stopping it at once; the next start recovers",
            "SIGKILL": "killing the server; the next start recovers",
        }
        self._notify(words[name])
