"""The server's directory.

::

    <data_dir>/
      data/           what PostgreSQL calls its data directory; appears when it is complete
      data.new-…/     a data directory in the making; removed by the next start
      pgpass          the password, in libpq's form: PGPASSFILE=…/pgpass psql -h 127.0.0.1 …
      postgres.log    what the server says, and postgres.log.1 from before
      lock            held as long as anything of the server runs; names who started it
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from moored.embedded import _guard
from moored.embedded._errors import EmbeddedError
from moored.embedded._files import open_file, read_file
from moored.embedded._lock import wait_free

__all__ = ["Directory", "default_data_dir"]

_LOG_LIMIT = 10_000_000
_TAIL = 64_000
_STAGE = "data.new-"


def default_data_dir() -> Path:
    """Where a user's server keeps its data: for root /var/lib/moored, else the XDG state home."""
    if os.geteuid() == 0:
        return Path("/var/lib/moored/postgres")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "moored" / "postgres"


class Directory:
    """One server's directory: a given one, which stays, or a temporary one."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.temporary = path is None
        self._path = None if path is None else Path(path).absolute()

    @property
    def path(self) -> Path:
        """Where it is; a temporary one has no place before it is made."""
        if self._path is None:
            raise EmbeddedError("the server has not been started, so it has no directory yet")
        return self._path

    @property
    def made(self) -> bool:
        """Whether there is a place for it yet."""
        return self._path is not None

    @property
    def data(self) -> Path:
        """What PostgreSQL calls its data directory."""
        return self.path / "data"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.path / "postgres.log"

    @property
    def pgpass(self) -> Path:
        """The password."""
        return self.path / "pgpass"

    @property
    def major(self) -> int | None:
        """The major version that made the data, or None where there are none."""
        marker = self.data / "PG_VERSION"
        if not os.path.lexists(marker):
            return None
        try:
            # Not part of the error: it may be what a link led to.
            return int(read_file(marker)[:8].split(".")[0])
        except (ValueError, OSError):
            raise EmbeddedError(
                f"{marker} holds no version of PostgreSQL: restore it, or name another data_dir"
            ) from None

    def owner(self) -> int:
        """The number of the user whom the data, or else the directory, belongs to."""
        return (self.data if self.data.exists() else self.path).stat().st_uid

    def make(self) -> bool:
        """Make the directory; False when it was there already."""
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="moored-postgres-"))
            weakref.finalize(self, _discard, self._path, os.getpid())
            return True
        existed = self._path.exists()
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedError(
                f"the data directory {self._path} cannot be made: {error.strerror}; "
                "make it, or name another with data_dir"
            ) from error
        if os.path.lexists(self._path / "PG_VERSION"):
            raise EmbeddedError(
                f"{self._path} is itself what PostgreSQL calls a data directory; Moored keeps "
                f"that one level below: move it to {self.data}"
            )
        if self.major is None and self.data.exists() and any(self.data.iterdir()):
            raise EmbeddedError(
                f"{self.data} is not empty, and holds no data of PostgreSQL: move it away, "
                "or name another data_dir"
            )
        return not existed

    def stage(self) -> Path:
        """A place to make the data in, so that half a data directory never looks like one."""
        for left in self.path.glob(f"{_STAGE}*"):
            shutil.rmtree(left, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=self.path))
        (stage / "data").mkdir(mode=0o700)
        return stage

    def publish(self, stage: Path) -> None:
        """Put the finished data and its password in place; the last rename is what counts."""
        os.replace(stage / "pgpass", self.pgpass)
        os.rename(stage / "data", self.data)

    def open_log(self) -> int:
        """The log, to be appended to; a long one is put aside."""
        if self.log_size() > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))
        return open_file(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log_size(self) -> int:
        """How long the log is now."""
        return self.log.lstat().st_size if self.made and self.log.exists() else 0

    def log_tail(self, lines: int = 20, *, since: int = 0) -> str:
        """The last lines of the log, of what came after the byte `since`."""
        size = self.log_size()
        if size == 0:
            return ""
        with open(open_file(self.log), "rb") as file:
            file.seek(max(since if since <= size else 0, size - _TAIL))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def remove(self) -> None:
        """Remove a temporary directory; the next start makes a new one."""
        if self.temporary and self._path is not None:
            _guard.remove(str(self._path))
            self._path = None


def _discard(path: Path, owner: int) -> None:
    """Remove what was forgotten, unless a server still runs there: then its guard will."""
    if os.getpid() == owner and path.exists() and wait_free(path, timeout=0):
        _guard.remove(str(path))
