"""The data directory of one server: created once, then configured at each start."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from . import _guard
from ._account import Account
from ._binaries import Binaries
from ._descriptors import OwnedDescriptor
from ._directory import Directory
from ._errors import EmbeddedError, VersionMismatch
from ._files import read_file, sync_directory, write_file
from ._guarded import Guarded
from ._options import KILL_TIMEOUT, ServerOptions, environment
from ._pgpass import pgpass_line, pgpass_passwords

__all__ = ["Cluster"]

#: Matches the line of initdb's output, or of the server that it runs, with the error.
_ERROR = re.compile(r"\b(error|FATAL|PANIC):")
_INCLUDE = "\n# The settings of the embedded server.\ninclude_if_exists = 'moored.conf'\n"


class Cluster:
    """The data of one server, with its binaries and the user that it runs as."""

    def __init__(
        self, directory: Directory, options: ServerOptions, account: Account, binaries: Binaries
    ) -> None:
        self.directory = directory
        self.options = options
        self.account = account
        self.binaries = binaries

    def initdb(self, data: Path) -> list[str]:
        """Return the command that creates the data."""
        return self.options.initdb(self.binaries, self._place(data, _guard.DATA_FD))

    def postgres(self, port: int) -> list[str]:
        """Return the command that runs the server."""
        data = self._place(self.directory.data, _guard.DATA_FD)
        socket_dir = self.options.socket_dir
        place = self._place(socket_dir, _guard.SOCKET_FD) if socket_dir else None
        return self.options.postgres(self.binaries, data, port, place)

    def _place(self, directory: Path, descriptor: int) -> str:
        """Return the path by which the server opens a directory.

        If the server's user may not enter a directory above it, the path is that of a descriptor
        that root has opened.
        """
        if self.account.may_enter(directory):
            return str(directory)
        if sys.platform != "linux":
            raise EmbeddedError(
                f"the server's user {self.account} may not enter {directory}: "
                "make the directories above it accessible to others, or choose another"
            )
        return f"/proc/self/fd/{descriptor}"

    def create(self, lock: OwnedDescriptor, check: Callable[[Guarded], object]) -> None:
        """Create the data directory under guard; `check` waits for the end of initdb."""
        stage = self.directory.stage()
        try:
            self._fill(stage, lock, check)
            self.directory.publish(stage)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        if self.options.durable:
            sync_directory(self.directory.path)

    def _fill(self, stage: Path, lock: OwnedDescriptor, check: Callable[[Guarded], object]) -> None:
        self.allow_traversal(stage)
        self.account.own(stage / "data")
        password = self.options.password or secrets.token_urlsafe(24)
        line = pgpass_line(self.options.user, password)
        write_file(stage / "pgpass", line, sync=self.options.durable)
        write_file(stage / "password", password, owner=self.account)
        self._make_socket_dir()
        since = self.directory.log_size()
        initdb = self.guarded(self.initdb(stage / "data"), stage / "data", lock)
        check(initdb)
        if initdb.status != 0:
            log = self.directory.log_tail(since=since)
            why = next((line for line in log.splitlines() if _ERROR.search(line)), "")
            raise EmbeddedError(
                f"initdb failed with status {initdb.status}" + (f": {why.strip()}" if why else ""),
                log=log,
            )
        if self.options.durable:
            sync_directory(stage)

    def allow_traversal(self, directory: Path) -> None:
        """Let the server's user pass through a directory of this process to its own files."""
        if self.account.foreign:
            directory.chmod(0o711)

    def guarded(
        self,
        command: list[str],
        data: Path,
        lock: OwnedDescriptor,
        on_stopping: Callable[[str], None] = lambda signal: None,
        settle: Callable[[], object] = lambda: None,
    ) -> Guarded:
        """Run one of PostgreSQL's programs on `data`, as the server's user, under guard."""
        arguments = (
            self.account.drop,
            str(data),
            str(self.options.socket_dir or ""),
            f"{self.options.stop_timeout},{KILL_TIMEOUT}",
            str(self.directory.path) if self.directory.temporary else "",
        )
        log = self.directory.open_log()
        try:
            return Guarded(
                command,
                arguments,
                environment=environment(self.binaries),
                log=log,
                lock=lock,
                on_stopping=on_stopping,
                settle=settle,
            )
        finally:
            os.close(log)

    def check_version(self) -> None:
        """Raise `VersionMismatch` if the data were created by another major version."""
        made, runs = self.directory.major, self.binaries.major
        if made != runs:
            raise VersionMismatch(
                f"{self.directory.path} has data of PostgreSQL {made}, and this is "
                f"{self.binaries}: start it with version={made} (or the bin_dir of a PostgreSQL "
                f"{made}) and move the data by pg_dump, or choose another data_dir"
            )

    def password(self) -> str:
        """Return the password of the user, as given or as stored when the data were created."""
        if self.options.password is not None:
            return self.options.password
        file = self.directory.pgpass
        known = pgpass_passwords(read_file(file)) if file.exists() else {}
        if self.options.user not in known:
            others = f", only for {', '.join(map(repr, known))}" if known else ""
            raise EmbeddedError(
                f"{file} has no password for {self.options.user!r}{others}: "
                "pass another user, or pass the password"
            )
        return known[self.options.user]

    def configure(self) -> None:
        """Write the settings, and include them in postgresql.conf."""
        data = self.directory.data
        write_file(data / "moored.conf", self.options.settings(), owner=self.account)
        main = read_file(data / "postgresql.conf")
        if "moored.conf" not in main:
            write_file(data / "postgresql.conf", main + _INCLUDE, owner=self.account)
        self._make_socket_dir()

    def _make_socket_dir(self) -> None:
        place = self.options.socket_dir
        if place is not None and not place.exists():
            place.mkdir(mode=0o700, parents=True)
            self.account.own(place)
