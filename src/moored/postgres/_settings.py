"""The settings of `Postgres`, validated at construction."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict

from moored.kernel import SECRETS, refuse

from ._errors import ConfigurationError

__all__ = ["Settings", "default_state_dir", "libpq_defaults"]

_STREAM_ID = re.compile(r"[a-z0-9_]{1,40}")


def libpq_defaults() -> dict[str, str]:
    """Return libpq's values for parameters that a URL does not set."""
    known = psycopg.pq.Conninfo.get_defaults()
    return {each.keyword.decode(): each.val.decode() for each in known if each.val}


def default_state_dir(replication_url: str) -> Path:
    """Return the default directory for the state of a database's streams.

    `MOORED_STATE_DIR`, if it is set. Otherwise a directory for this database, by its host, port
    and name, below `/var/lib/moored/streams` for root, and below `moored/streams` of the XDG
    state home (`~/.local/state`) for other users, so that streams of different databases with the
    same stream_id do not collide.
    """
    if given := os.environ.get("MOORED_STATE_DIR"):
        return Path(given).absolute()
    return _state_home() / "moored" / "streams" / _database_of(replication_url)


def _state_home() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib")
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise ConfigurationError(
            f"this user has no home directory for the state of the stream ({error}): set state_dir "
            "or MOORED_STATE_DIR"
        ) from error


def _database_of(url: str) -> str:
    """Return a directory name: the host, the port and the database of a URL."""
    SECRETS.add_from(url)  # an unescaped password may become part of the host
    known = libpq_defaults()
    try:
        known |= {name: str(value) for name, value in conninfo_to_dict(url).items() if value}
    except psycopg.ProgrammingError:
        pass  # an invalid URL is reported when it is used
    host = known.get("host") or known.get("hostaddr") or "localhost"
    parts = (host, known.get("port", ""), known.get("dbname") or known.get("user", ""))
    name = SECRETS.hide("_".join(parts))
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100] or "default"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `Postgres`, under the names of its parameters."""

    database_url: str = field(repr=False)
    replication_url: str = field(repr=False)
    stream_id: str = "default"
    pool_size: int = 20
    state_dir: Path
    slot: str = ""
    publication: str = ""
    manual_publication: bool = False
    temporary_slot: bool = False
    recreate_slot: bool = False
    failover_slot: bool = True
    binary: bool = False
    messages: bool = False
    connect_timeout: float = 30.0
    shutdown_timeout: float = 10.0
    check_every: float = 60.0
    sleep_after: float | None = None
    max_retained_wal: int | None = None
    on_retained_wal: Literal["warn", "drop"] = "warn"
    application_name: str = "moored"
    show_queries: bool = False

    def __post_init__(self) -> None:
        SECRETS.add_from(self.database_url)
        SECRETS.add_from(self.replication_url)
        refuse("Postgres", self._mistakes())

    @property
    def slot_name(self) -> str:
        """The name of the slot, and of its lock."""
        return self.slot or f"moored_slot_{self.stream_id}"

    @property
    def publication_name(self) -> str:
        """The name of the publication."""
        return self.publication or f"moored_publication_{self.stream_id}"

    def _mistakes(self) -> list[str]:
        found = []
        if not _STREAM_ID.fullmatch(self.stream_id):
            found.append(
                f"stream_id={self.stream_id!r} must be 1 to 40 lower-case letters, digits or "
                "underscores: it becomes part of the slot's name"
            )
        if self.pool_size < 1:
            found.append(f"pool_size={self.pool_size!r} must be at least 1")
        for name in (
            "connect_timeout",
            "shutdown_timeout",
            "check_every",
            "sleep_after",
            "max_retained_wal",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name}={value!r} must be more than 0")
        if self.on_retained_wal not in ("warn", "drop"):
            found.append(f"on_retained_wal={self.on_retained_wal!r} must be 'warn' or 'drop'")
        return found
