"""A storage in a directory: one file for each record, for ordinary tools to read and back up.

A record is written to a temporary file, synced, and then renamed; the directory is synced as well.
So after a crash a record is the old one or the new one. Temporary files are in `.tmp`, and are
removed when the storage is opened. A profile is deleted in the same way: its directory is moved to
`.tmp`, and then removed. Several records that change together are first written to `.journal`,
which is replayed after a crash, and before each call.

One storage object at a time may use the directory; several processes can share a SQLite file.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from .._errors import StorageError
from ._file_names import from_file_name, to_file_name
from ._storage import Changes
from ._thread import ThreadStorage, sync_directory

__all__ = ["FileStorage"]

T = TypeVar("T")

_FORMAT = b"moored files 1\n"


class FileStorage(ThreadStorage):
    """Records in the directory `path`, which only its owner may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        #: Files that a crash had left half written, removed when the storage was opened.
        self.leftovers = 0
        self._temporary = self.path / ".tmp"
        self._journal = self.path / ".journal"
        self._lock: int | None = None

    async def new(self, profile: str) -> bool:
        """Make a profile; False if it is there already."""
        return await self._do(lambda: self._make_directory(self.path, profile))

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None."""
        return await self._do(lambda: _read(self._at(profile, namespace, key)))

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record."""
        await self._do(lambda: self._apply(profile, namespace, key, value))

    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one."""
        await self._do(lambda: self._apply(profile, namespace, key, None))

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and delete several records: a journal makes the change atomic.

        If it fails after the journal was written, it is completed before the next call.
        """
        for place in changes:
            self._at(profile, *place)  # refuse a name that is too long, before the journal has it
        lines = [
            [*place, None if value is None else base64.b64encode(value).decode()]
            for place, value in changes.items()
        ]

        def write() -> None:
            self._replace(self._journal, json.dumps([profile, lines]).encode())
            self._moment("in the journal")
            self._replay()

        await self._do(write)

    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records."""

        def remove() -> None:
            place = self._at(profile)
            if place.exists():
                away = self._temporary / secrets.token_hex(8)
                place.rename(away)
                sync_directory(self.path)
                self._moment("taken away")
                shutil.rmtree(away)

        await self._do(remove)

    async def list_profiles(self) -> list[str]:
        """All profiles, sorted."""
        return await self._do(lambda: sorted(_names_in(self.path)))

    async def namespaces(self, profile: str) -> list[str]:
        """The namespaces in which the profile has a record, sorted."""

        def look() -> list[str]:
            names = _names_in(self._at(profile))
            return sorted(name for name in names if any(_names_in(self._at(profile, name))))

        return await self._do(look)

    async def keys(self, profile: str, namespace: str) -> list[str]:
        """The keys of the profile's records in a namespace, sorted."""
        return await self._do(lambda: sorted(_names_in(self._at(profile, namespace))))

    async def _do(self, call: Callable[[], T], *, writes: bool | None = True) -> T:
        def replay_and_call() -> T:
            if writes is not None:  # else the directory is not locked yet
                self._replay()
            return call()

        return await super()._do(replay_and_call, writes=writes)

    # -- in the thread --------------------------------------------------------------------------

    def _advice(self, error: Exception) -> str:
        # Without the file's name, which may name a recipient.
        return (
            f"cannot be used as storage: {getattr(error, 'strerror', None) or error}; check the "
            "free space, and the permissions of the directory and its files"
        )

    def _apply(self, profile: str, namespace: str, key: str, value: bytes | None) -> None:
        file = self._at(profile, namespace, key)
        if value is not None:
            self._make_directory(self.path, profile)
            self._make_directory(self._at(profile), namespace)
            self._replace(file, value)
        elif file.exists():
            file.unlink()
            sync_directory(file.parent)

    def _replay(self) -> None:
        """Make the changes in the journal, if there is one; it is always complete."""
        journal = _read(self._journal)
        if journal is None:
            return
        profile, lines = json.loads(journal)
        for namespace, key, value in lines:
            data = None if value is None else base64.b64decode(value)
            self._apply(profile, namespace, key, data)
            self._moment("one of several")
        self._journal.unlink()
        sync_directory(self.path)

    def _at(self, *names: str) -> Path:
        return self.path.joinpath(*map(to_file_name, names))

    def _make_directory(self, parent: Path, name: str) -> bool:
        place = parent / to_file_name(name)
        if place.is_dir():
            return False
        place.mkdir(mode=0o700)
        sync_directory(parent)
        return True

    def _replace(self, file: Path, value: bytes) -> None:
        draft = self._temporary / secrets.token_hex(8)
        try:
            with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as output:
                output.write(value)
                output.flush()
                self._moment("written")
                os.fsync(output.fileno())
            self._moment("on the disk")
            os.replace(draft, file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._moment("named")
        sync_directory(file.parent)

    def _moment(self, name: str) -> None:
        """Do nothing: tests replace this to crash at a point where no data may be lost."""

    def _take(self) -> None:
        if not self.path.exists():
            self.path.mkdir(mode=0o700, parents=True)
            sync_directory(self.path.parent)
        elif not self.path.is_dir():
            raise StorageError(f"{self.path} is a file, not a directory: choose another path")
        label = _read(self.path / ".format")
        if label is None and any(not name.startswith(".") for name in os.listdir(self.path)):
            raise StorageError(
                f"{self.path} holds other files, and is not a storage: choose an empty directory, "
                "or one that does not exist"
            )
        if label not in (None, _FORMAT):
            raise StorageError(
                f"{self.path} is a storage of another format ({label!r:.60}): use the version of "
                "Moored that created it"
            )
        self._take_lock()
        self._clean()
        self._replay()
        if label is None:
            self._replace(self.path / ".format", _FORMAT)

    def _take_lock(self) -> None:
        lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = os.read(lock, 20).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StorageError(
                f"{self.path} is in use by the process {owner}: stop it, choose another directory, "
                "or share a SQLite database instead"
            ) from None
        except BaseException:
            os.close(lock)  # for example, the disk is full
            raise
        self._lock = lock

    def _clean(self) -> None:
        self._temporary.mkdir(mode=0o700, exist_ok=True)
        for leftover in self._temporary.iterdir():
            self.leftovers += 1
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _names_in(place: Path) -> Iterator[str]:
    try:
        found = os.listdir(place)
    except FileNotFoundError:
        return
    for name in found:
        text = from_file_name(name)
        if text is not None:
            yield text


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
