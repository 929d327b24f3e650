"""The errors of the embedded server.

::

    MooredError
    └── EmbeddedError            the server cannot start, run or stop; has the end of its log
        ├── BinariesNotFound     no PostgreSQL to run: no wheel, or a wrong path
        ├── DataDirectoryInUse   another process uses this data directory; has its pid
        ├── VersionMismatch      the data were created by another major version of PostgreSQL
        └── PortInUse            another program listens on the chosen port
"""

from __future__ import annotations

from moored.kernel import MooredError


class EmbeddedError(MooredError):
    """The embedded server cannot start, run or stop; `log` holds the last lines of its log."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}\nthe end of the server's log:\n{log}" if log else message)
        self.log = log


class BinariesNotFound(EmbeddedError):
    """The PostgreSQL programs are not installed, or not at the given path."""


class DataDirectoryInUse(EmbeddedError):
    """Another process uses this data directory; `pid` is its pid, or None if unknown."""

    def __init__(self, message: str, *, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class VersionMismatch(EmbeddedError):
    """The data directory was created by another major version of PostgreSQL."""


class PortInUse(EmbeddedError):
    """Another program listens on the chosen port."""
