"""Small files in a directory that may belong to somebody else.

Root reads and writes in the directory of an unprivileged server. Whoever breaks into that server
could leave a link or a FIFO there, so nothing here follows the one or waits for the other.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moored.embedded._account import Account

__all__ = ["open_file", "read_file", "sync_directory", "write_file"]

_LARGEST = 10_000_000


def write_file(path: Path, text: str, *, owner: Account | None = None, sync: bool = False) -> None:
    """Write a file that its owner alone may read, whole or not at all."""
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


def open_file(path: Path) -> int:
    """Open a file to read it, if it is one: neither a link to another nor a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_file(path: Path) -> str:
    """Read a small file, if it is one."""
    with open(open_file(path), errors="replace") as file:
        return file.read(_LARGEST)


def sync_directory(path: Path) -> None:
    """Have the names in a directory written to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
