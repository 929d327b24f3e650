"""Open a storage by its name: a path, `files:DIR` or `memory:`."""

from __future__ import annotations

import os
from pathlib import Path

from .._errors import StorageError
from ._files import FileStorage
from ._memory import MemoryStorage
from ._seal import Seal
from ._sealed import Sealed
from ._sqlite import SqliteStorage
from ._storage import Keys, Storage

__all__ = ["open_storage"]


def open_storage(where: str | os.PathLike[str] | Storage, *, key: Keys | None = None) -> Storage:
    """Return the storage of that name, to be opened with `async with`.

    `"accounts.db"` or a path is a SQLite database, `"files:DIR"` or an existing directory is a
    directory of files, `"memory:"` is lost with the process. Records have a checksum, and with a
    key they are encrypted (see `Seal`). A `Storage` of your own is returned as it is or, with a
    key, encrypted.
    """
    inner = where if isinstance(where, Storage) else _adapter(where)
    if isinstance(where, Storage) and key is None:
        return where
    if isinstance(where, Sealed):
        raise StorageError(f"{where!r} is encrypted already: pass the key only once")
    return Sealed(inner, Seal(key))


def _adapter(where: str | os.PathLike[str]) -> Storage:
    if not isinstance(where, str):
        path = Path(where)
        return FileStorage(path) if path.is_dir() else SqliteStorage(path)
    scheme, colon, rest = where.partition(":")
    if where == "memory:":
        return MemoryStorage()
    if colon and scheme == "files" and rest:
        return FileStorage(Path(rest))
    mistake = _mistake(where, scheme, rest if colon else "")
    if mistake:
        # A URL may hold a password, so only its scheme is shown.
        shown = f"{scheme}://…" if rest.startswith("//") else where
        raise StorageError(
            f"storage {shown!r}: {mistake}. Write the path of a SQLite database, as in "
            "'accounts.db', 'files:DIR' for a directory of files, or 'memory:'"
        )
    return _adapter(Path(where))


def _mistake(where: str, scheme: str, rest: str) -> str:
    if not where.strip():
        return "the name is empty"
    if where == ":memory:" or scheme == "memory":
        return "a storage in memory is called 'memory:', without a name"
    if where == "files:":
        return "the directory is missing"
    if rest.startswith("//"):
        return f"there is no storage for {scheme}://"
    if where.endswith("/") and not Path(where).is_dir():
        return "the directory does not exist, and a file name cannot end with '/'"
    return ""
