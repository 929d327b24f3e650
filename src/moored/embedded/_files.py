"""Small files in a directory that may belong to another user.

Root reads and writes in the directory of an unprivileged server. An attacker in that server could
leave a FIFO or a link to another user's file there: these functions open neither.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._account import Account

__all__ = ["open_file", "read_file", "sync_directory", "write_file"]

_LARGEST = 10_000_000


def write_file(path: Path, text: str, *, owner: Account | None = None, sync: bool = False) -> None:
    """Write a file atomically; only its owner may read it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            if owner is not None and owner.foreign:
                os.fchown(descriptor, owner.uid, owner.gid)
            file.write(text)
            file.flush()
            if sync:
                os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; raises `OSError` for a FIFO or a link to a file of another user."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        why = "it is not a regular file"
    elif status.st_nlink > 1 and status.st_uid != path.parent.stat().st_uid:
        why = "it is a link to a file of another user"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, why, str(path))


def read_file(path: Path) -> str:
    """Read a small regular file."""
    with open(open_file(path), errors="replace") as file:
        return file.read(_LARGEST)


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that the names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
