"""The errors of the service; each text is a line for the person who started it.

::

    MooredError
    ├── ConfigError              mistakes in the configuration, all of them (the kernel's class)
    └── ServiceError             the service cannot start, or cannot go on
        ├── CannotListen         the address cannot be had; says who has it where that can be found
        └── DatabaseUnreachable  PostgreSQL does not answer at its address
"""

from __future__ import annotations

from moored.kernel import ConfigError, MooredError

__all__ = ["CannotListen", "ConfigError", "DatabaseUnreachable", "ServiceError"]


class ServiceError(MooredError):
    """The service cannot start, or cannot go on."""


class CannotListen(ServiceError):
    """The address to listen on cannot be had."""


class DatabaseUnreachable(ServiceError):
    """PostgreSQL does not answer at its address; `reason` is what the driver said, in one line."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
