"""The token that `serve` made for itself, in a file for the commands of the same user.

The file is named after the port and is removed at the end. One that a killed service has left is
harmless: its token is worth nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["stored_token", "token_stored"]


@contextmanager
def token_stored(port: int, token: str) -> Iterator[Path | None]:
    """Store a token until the end of the block; yields None if this user has no place for it."""
    try:
        path = _path(port)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w", encoding="ascii") as file:
            file.write(token)
        new.replace(path)
    except (OSError, RuntimeError):  # no home directory, or a read-only one
        yield None
        return
    try:
        yield path
    finally:
        if stored_token(port) == token:
            with suppress(OSError):
                path.unlink()


def stored_token(port: int) -> str | None:
    """Return the token of this user's service on a port, if it has made one for itself."""
    try:
        return _path(port).read_text(encoding="ascii") or None
    except (OSError, RuntimeError, ValueError):
        return None


def _path(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "moored" / "tokens" / str(port)
