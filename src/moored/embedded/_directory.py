"""The server's directory.

::

    <data_dir>/
      data/           PostgreSQL's data directory; appears when it is complete
      data.new-…/     an incomplete data directory; removed by the next start
      pgpass          the password, in libpq's form: PGPASSFILE=…/pgpass psql -h 127.0.0.1 …
      postgres.log    the server's log, and the older postgres.log.1
      lock            locked while any process of the server runs; contains the owner's pid
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from . import _guard
from ._errors import EmbeddedError
from ._files import open_file, read_file
from ._lock import wait_free

__all__ = ["Directory", "default_data_dir"]

_LOG_LIMIT = 10_000_000
_TAIL = 64_000
_STAGE = "data.new-"


def default_data_dir() -> Path:
    """Return the default directory: below /var/lib/moored for root, else the XDG state home."""
    if os.geteuid() == 0:
        return Path("/var/lib/moored/postgres")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "moored" / "postgres"


class Directory:
    """One server's directory: a given one, which is kept, or a temporary one."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.temporary = path is None
        self._path = None if path is None else Path(path).absolute()

    @property
    def path(self) -> Path:
        """The path; a temporary directory has none before it is created."""
        if self._path is None:
            raise EmbeddedError("the server has not been started, so it has no directory yet")
        return self._path

    @property
    def made(self) -> bool:
        """Whether the path is known yet."""
        return self._path is not None

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.path / "data"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.path / "postgres.log"

    @property
    def pgpass(self) -> Path:
        """The password file."""
        return self.path / "pgpass"

    @property
    def major(self) -> int | None:
        """The major version that created the data, or None if there are none."""
        marker = self.data / "PG_VERSION"
        if not os.path.lexists(marker):
            return None
        try:
            # The content is not part of the error: a link may have led to another file.
            return int(read_file(marker)[:8].split(".")[0])
        except (ValueError, OSError):
            raise EmbeddedError(
                f"{marker} does not contain a PostgreSQL version: restore it, or choose another "
                "data_dir"
            ) from None

    def owner(self) -> int:
        """Return the uid of the owner of the data, or else of the directory."""
        return (self.data if self.data.exists() else self.path).stat().st_uid

    def make(self) -> bool:
        """Create the directory; return False if it existed already."""
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="moored-postgres-"))
            weakref.finalize(self, _discard, self._path, os.getpid())
            return True
        existed = self._path.exists()
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedError(
                f"the data directory {self._path} cannot be created: {error.strerror}; "
                "create it, or choose another with data_dir"
            ) from error
        if os.path.lexists(self._path / "PG_VERSION"):
            raise EmbeddedError(
                f"{self._path} is itself a PostgreSQL data directory; Moored expects it one level "
                f"below: move it to {self.data}"
            )
        if self.major is None and self.data.exists() and any(self.data.iterdir()):
            raise EmbeddedError(
                f"{self.data} is not empty, and has no data of PostgreSQL: move it away, "
                "or choose another data_dir"
            )
        return not existed

    def stage(self) -> Path:
        """Return a new directory to create the data in: `data` must never be incomplete."""
        for left in self.path.glob(f"{_STAGE}*"):
            shutil.rmtree(left, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=self.path))
        (stage / "data").mkdir(mode=0o700)
        return stage

    def publish(self, stage: Path) -> None:
        """Move the password and the complete data into place, the data last."""
        os.replace(stage / "pgpass", self.pgpass)
        os.rename(stage / "data", self.data)

    def open_log(self) -> int:
        """Open the log for appending; a long one is renamed first."""
        if self.log_size() > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))
        return open_file(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log_size(self) -> int:
        """Return the size of the log in bytes."""
        return self.log.lstat().st_size if self.made and self.log.exists() else 0

    def log_tail(self, lines: int = 20, *, since: int = 0) -> str:
        """Return the last lines of the log after the byte `since`."""
        size = self.log_size()
        if size == 0:
            return ""
        with open(open_file(self.log), "rb") as file:
            file.seek(max(since if since <= size else 0, size - _TAIL))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def remove(self) -> None:
        """Remove a temporary directory; the next start creates a new one."""
        if self.temporary and self._path is not None:
            _guard.remove(str(self._path))
            self._path = None


def _discard(path: Path, owner: int) -> None:
    """Remove a temporary directory, unless its server still runs: then its guard removes it."""
    if os.getpid() == owner and path.exists() and wait_free(path, timeout=0):
        _guard.remove(str(path))
