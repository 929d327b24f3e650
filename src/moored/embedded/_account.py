"""Who the server runs as: PostgreSQL refuses root."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from moored.embedded._directory import Directory
from moored.embedded._errors import EmbeddedError

__all__ = ["Account"]


@dataclass(frozen=True)
class Account:
    """The user that the server runs as."""

    name: str
    uid: int
    gid: int

    @classmethod
    def choose(cls, directory: Directory, run_as: str | None = None) -> Account:
        """This process's user; for root, the one asked for, or who owns the data, or nobody."""
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
                f"there is no user {name!r} on this machine to run PostgreSQL as "
                "(it refuses root): name another with run_as"
            ) from None
        if found.pw_uid == 0:
            raise EmbeddedError("PostgreSQL refuses to run as root: name another user with run_as")
        return cls(name, found.pw_uid, found.pw_gid)

    @property
    def foreign(self) -> bool:
        """Whether it is another user than this process's."""
        return self.uid != os.geteuid()

    @property
    def drop(self) -> str:
        """What the guard must change to: `uid:gid`, or nothing."""
        return f"{self.uid}:{self.gid}" if self.foreign else ""

    def own(self, path: Path) -> None:
        """Give one file or directory to this user."""
        if self.foreign:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def own_all(self, directory: Path) -> None:
        """Give a directory and all that is in it to this user, following no links."""
        self.own(directory)
        for place, directories, files in os.walk(directory):
            for name in (*directories, *files):
                self.own(Path(place, name))

    def may_enter(self, directory: Path) -> bool:
        """Whether this user may walk down to `directory` and into it.

        Judged by the mode bits: an access list that says otherwise costs no more than a detour.
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
