"""Small files in a directory that may belong to somebody else.

Root writes into the directory of an unprivileged server. Whoever breaks into that server could
leave a link there, so nothing here follows one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moored.embedded._account import Account

__all__ = ["read_file", "sync_directory", "write_file"]


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


def read_file(path: Path) -> str:
    """Read a file, if it is one and not a link to another."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        return file.read()


def sync_directory(path: Path) -> None:
    """Have the names in a directory written to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
