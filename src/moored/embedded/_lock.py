"""The lock of a server's directory, held while any process of the server runs.

The lock belongs to an open file, which the guard and the server inherit. So the directory is free
exactly when no process of the server runs, however its owner, its guard or the server itself died.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ._descriptors import OwnedDescriptor
from ._errors import DataDirectoryInUse, EmbeddedError
from ._files import open_file

__all__ = ["take", "wait_free"]

_NAME = "lock"
_TICK = 0.01


def take(directory: Path, timeout: float) -> OwnedDescriptor:
    """Lock the directory for this process and all that inherit the descriptor.

    `timeout` is the time to wait for the server of a dead owner, which may still be stopping.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = OwnedDescriptor(os.open(directory / _NAME, flags, 0o600))
    except OSError as error:
        raise EmbeddedError(
            f"the data directory {directory} cannot be written to: {error.strerror}; "
            "make it writable for this user, or choose another with data_dir"
        ) from error
    try:
        _await(lock.descriptor, directory, time.monotonic() + timeout)
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"{os.getpid()} {_birth(os.getpid())}\n".encode(), 0)
    except BaseException:
        lock.close()
        raise
    return lock


def wait_free(directory: Path, timeout: float) -> bool:
    """Wait until no process of the directory's server runs; return False after the timeout."""
    deadline = time.monotonic() + timeout
    try:
        probe = open(open_file(directory / _NAME), "rb")  # noqa: SIM115 (closed below)
    except OSError:
        return True
    with probe:
        while not _try(probe.fileno(), fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_TICK)
    return True


def _await(lock: int, directory: Path, deadline: float) -> None:
    while not _try(lock, fcntl.LOCK_EX):
        holder = _LockHolder.read(lock)
        if holder.alive or time.monotonic() >= deadline:
            raise DataDirectoryInUse(
                f"the data directory {directory} is in use by {holder}", pid=holder.pid
            )
        time.sleep(_TICK)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class _LockHolder:
    """The process that wrote its pid into the lock."""

    pid: int | None
    birth: str

    @classmethod
    def read(cls, lock: int) -> _LockHolder:
        pid, _, birth = os.pread(lock, 64, 0).decode().strip().partition(" ")
        return cls(int(pid) if pid.isdigit() else None, birth)

    @property
    def alive(self) -> bool:
        """Whether the process is alive; one with another start time has reused its pid."""
        if self.pid is None or _birth(self.pid) != self.birth:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process of another user
        return True

    def __str__(self) -> str:
        if not self.alive:
            return (
                f"the server of process {self.pid}, which has died: "
                "wait until that server has stopped"
            )
        return f"process {self.pid}: stop that one, use its server, or choose another data_dir"


def _birth(pid: int) -> str:
    """Return the start time of a process in clock ticks; empty if unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]
