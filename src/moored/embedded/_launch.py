"""One start of the server, from any state of its directory until it accepts connections."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import _guard
from ._account import Account
from ._binaries import Binaries
from ._binaries_copy import accessible_binaries
from ._cluster import Cluster
from ._descriptors import OwnedDescriptor
from ._directory import Directory
from ._errors import DataDirectoryInUse, EmbeddedError, PortInUse
from ._files import read_file
from ._guarded import Guarded
from ._lock import take, wait_free
from ._options import ServerOptions
from ._ports import choose_port

__all__ = ["SETTLE", "Launch", "Launched"]

#: Seconds that the processes of a server may take to disappear after SIGKILL.
SETTLE = 15.0

_TICK = 0.01
_PROGRESS_INTERVAL = 5.0
_PORT_ATTEMPTS = 5
_PORT_TAKEN = "Address already in use"
_OTHER_SERVER = re.compile(r"\(PID (\d+)\) running in data directory")


@dataclass(frozen=True)
class Launched:
    """A server that accepts connections."""

    run: Guarded
    binaries: Binaries
    port: int
    password: str


class Launch:
    """One start; it either returns a running server or leaves no process behind."""

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
        self._progress_due = self._began + _PROGRESS_INTERVAL
        self._log_since = 0

    def start(self, port: int) -> Launched:
        """Start on that port, or on a free one if it is 0."""
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
            # From here on, the server's copy of the descriptor keeps the lock.
            lock.close()
        return Launched(run, cluster.binaries, port, cluster.password())

    def _cluster(self, lock: OwnedDescriptor, *, new: bool) -> Cluster:
        account = Account.choose(self._directory)
        binaries = accessible_binaries(self._binaries(), account, self._notify)
        cluster = Cluster(self._directory, self._options, account, binaries)
        if new:
            cluster.allow_traversal(self._directory.path)
        if self._directory.major is None:
            self._notify(f"creating the data directory {self._directory.data} ({binaries})")
            cluster.create(lock, self._await)
        cluster.check_version()
        cluster.password()
        cluster.configure()
        return cluster

    def _binaries(self) -> Binaries:
        if self._options.bin_dir is not None:
            return Binaries.at(self._options.bin_dir)
        return Binaries.find(self._options.version or self._directory.major)

    def _listen(
        self,
        cluster: Cluster,
        lock: OwnedDescriptor,
        port: int,
        attempts: int = _PORT_ATTEMPTS,
    ) -> tuple[Guarded, int]:
        chosen = port or choose_port()
        try:
            return self._run(cluster, lock, chosen), chosen
        except PortInUse:
            if port or attempts == 1:
                raise
        return self._listen(cluster, lock, port, attempts - 1)

    def _run(self, cluster: Cluster, lock: OwnedDescriptor, port: int) -> Guarded:
        where = self._options.where(port)
        crashed = os.path.lexists(self._directory.data / "postmaster.pid")
        self._remove_reused_pid_file()
        recovering = ", recovering after a crash" if crashed else ""
        self._notify(f"starting {cluster.binaries} on {where}{recovering}")
        run = cluster.guarded(
            cluster.postgres(port),
            self._directory.data,
            lock,
            on_stopping=self._stopping,
            settle=lambda: None if lock.open else wait_free(self._directory.path, SETTLE),
        )
        if self._await(run, lambda: self._ready(run)):
            raise self._start_error(run, where)
        return run

    def _remove_reused_pid_file(self) -> None:
        """Remove the pid file of a dead server if its pid now belongs to another process.

        PostgreSQL would refuse to start. No process of the old server can be left: all of them
        inherit the lock of the directory, which this process has. A server that another program has
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
                f"the pid {pid} of the last server now belongs to another process ({program}): "
                "removing its pid file"
            )
            _guard.release_memory(str(self._directory.path))
            file.unlink()

    def _await(self, run: Guarded, ready: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the program has ended, or is ready; return whether it has ended.

        A program that is neither in time is killed.
        """
        try:
            while not ready():
                if run.wait_ended(_TICK):
                    return True
                self._check_timeout()
        except BaseException:
            run.kill()
            run.wait_ended(SETTLE)
            raise
        return False

    def _check_timeout(self) -> None:
        waited = time.monotonic() - self._began
        if self._interrupted.is_set():
            raise EmbeddedError("the start was interrupted")
        if waited >= self._options.start_timeout:
            raise EmbeddedError(
                f"the server was not ready within start_timeout={self._options.start_timeout} s; "
                "raise it if the recovery after a crash takes longer",
                log=self._log(),
            )
        if time.monotonic() >= self._progress_due:
            self._progress_due += _PROGRESS_INTERVAL
            last = (self._log().splitlines() or ["its log is empty"])[-1]
            self._notify(f"still starting after {waited:.0f} s: {last}")

    def _ready(self, run: Guarded) -> bool:
        # The server writes its state to this file. One left by a crash has another pid.
        try:
            lines = read_file(self._directory.data / "postmaster.pid").splitlines()
        except OSError:
            return False
        pid, status = (lines[0], lines[7]) if len(lines) >= 8 else ("", "")
        return pid.strip() == str(run.pid) and status.strip() in ("ready", "standby")

    def _start_error(self, run: Guarded, where: str) -> EmbeddedError:
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
                f"process {pid}: stop that one, or choose another data_dir",
                pid=pid,
            )
        return EmbeddedError(f"the server ended with status {run.status} during its start", log=log)

    def _log(self) -> str:
        return self._directory.log_tail(since=self._log_since)

    def _stopping(self, name: str) -> None:
        words = {
            "SIGINT": "stopping the server (fast shutdown)",
            "SIGQUIT": "the server has not ended: immediate shutdown; the next start recovers",
            "SIGKILL": "killing the server; the next start recovers",
        }
        self._notify(words[name])
