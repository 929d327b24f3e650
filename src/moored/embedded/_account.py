"""The user that the server runs as: PostgreSQL refuses to run as root."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from ._directory import Directory
from ._errors import EmbeddedError

__all__ = ["Account"]


@dataclass(frozen=True)
class Account:
    """The user that the server runs as."""

    name: str
    uid: int
    gid: int

    @classmethod
    def choose(cls, directory: Directory) -> Account:
        """Return this process's user; for root, the owner of the data, or else `nobody`."""
        if owner := os.geteuid() or directory.owner():
            return cls._by_uid(owner)
        try:
            found = pwd.getpwnam("nobody")
        except KeyError:
            raise EmbeddedError(
                "PostgreSQL refuses to run as root, and this machine has no user 'nobody': make "
                "the user that it should run as the owner of data_dir"
            ) from None
        return cls(found.pw_name, found.pw_uid, found.pw_gid)

    @classmethod
    def _by_uid(cls, uid: int) -> Account:
        try:
            found = pwd.getpwuid(uid)
        except KeyError:  # a container may run as a number that has no name
            return cls(str(uid), uid, os.getegid() if uid == os.geteuid() else uid)
        return cls(found.pw_name, uid, found.pw_gid)

    @property
    def foreign(self) -> bool:
        """Whether this is another user than that of this process."""
        return self.uid != os.geteuid()

    @property
    def drop(self) -> str:
        """The user that the guard must change to, as `uid:gid`; empty for no change."""
        return f"{self.uid}:{self.gid}" if self.foreign else ""

    def own(self, path: Path) -> None:
        """Make this user the owner of one file or directory."""
        if self.foreign:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def may_enter(self, directory: Path) -> bool:
        """Whether this user may enter `directory` and all directories above it.

        Decided by the mode bits. If an access list allows more, the binaries are copied needlessly.
        """
        if not self.foreign:
            return True
        resolved = directory.resolve()
        return all(self._may_search(part) for part in (resolved, *resolved.parents))

    def _may_search(self, directory: Path) -> bool:
        status = directory.stat()
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)

    def __str__(self) -> str:
        return self.name
