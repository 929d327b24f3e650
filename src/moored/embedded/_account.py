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
    def choose(cls, directory: Directory, run_as: str | None = None) -> Account:
        """Return this process's user; for root, `run_as`, or the owner of the data, or `nobody`."""
        if os.geteuid() != 0:
            own = cls._by_uid(os.geteuid())
            if run_as not in (None, own.name):
                raise EmbeddedError(
                    f"the server cannot run as {run_as!r}: only root may choose another user; "
                    f"leave run_as out to run it as {own.name!r}"
                )
            return own
        if run_as is not None:
            return cls._by_name(run_as)
        owner = directory.owner()
        return cls._by_uid(owner) if owner else cls._by_name("nobody")

    @classmethod
    def _by_uid(cls, uid: int) -> Account:
        try:
            found = pwd.getpwuid(uid)
        except KeyError:  # a container may run as a number that has no name
            return cls(str(uid), uid, os.getegid() if uid == os.geteuid() else uid)
        return cls(found.pw_name, uid, found.pw_gid)

    @classmethod
    def _by_name(cls, name: str) -> Account:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            raise EmbeddedError(
                f"this machine has no user {name!r} to run PostgreSQL as "
                "(it refuses to run as root): choose another with run_as"
            ) from None
        if found.pw_uid == 0:
            raise EmbeddedError(
                "PostgreSQL refuses to run as root: choose another user with run_as"
            )
        return cls(name, found.pw_uid, found.pw_gid)

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
