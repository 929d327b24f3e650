"""How a manager behaves: every number in one place, checked once, then sealed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moored.kernel import refuse

from ._setup import StreamOptions

__all__ = ["Settings"]

_STREAM_ID = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `Postgres`, under the names of its parameters."""

    database_url: str
    replication_url: str
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
    sleep_after: float | None = None
    max_retained_wal: int | None = None
    on_retained_wal: Literal["warn", "drop"] = "warn"
    application_name: str = "moored"

    def __post_init__(self) -> None:
        refuse("Postgres", self._mistakes())

    @property
    def slot_name(self) -> str:
        """The name of the slot, and of its lock."""
        return self.slot or f"moored_slot_{self.stream_id}"

    @property
    def publication_name(self) -> str:
        """The name of the publication."""
        return self.publication or f"moored_publication_{self.stream_id}"

    @property
    def stream(self) -> StreamOptions:
        """What to stream, and how."""
        return StreamOptions(
            slot=self.slot_name,
            publication=self.publication_name,
            try_creating_publication=not self.manual_publication,
            recreate_slot=self.recreate_slot,
            temporary_slot=self.temporary_slot,
            failover=self.failover_slot,
            binary=self.binary,
            messages=self.messages,
        )

    def _mistakes(self) -> list[str]:
        found = []
        if not _STREAM_ID.fullmatch(self.stream_id):
            found.append(
                f"stream_id={self.stream_id!r} must be 1 to 40 small letters, digits or "
                "underscores: it becomes part of a slot's name"
            )
        if self.pool_size < 1:
            found.append(f"pool_size={self.pool_size!r} must be at least 1")
        for name in ("connect_timeout", "shutdown_timeout", "sleep_after", "max_retained_wal"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name}={value!r} must be more than 0")
        if self.on_retained_wal not in ("warn", "drop"):
            found.append(f"on_retained_wal={self.on_retained_wal!r} must be 'warn' or 'drop'")
        return found
