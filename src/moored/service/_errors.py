"""The errors of the service; each message is one line for the person who started it.

::

    MooredError
    ├── ConfigError              all mistakes in the configuration (the kernel's class)
    └── ServiceError             the service cannot start, or cannot continue
        ├── CannotListen         the address cannot be bound
        └── DatabaseUnreachable  PostgreSQL cannot be reached at its address
"""

from __future__ import annotations

from moored.kernel import ConfigError, MooredError

__all__ = ["CannotListen", "ConfigError", "DatabaseUnreachable", "ServiceError"]


class ServiceError(MooredError):
    """The service cannot start, or cannot continue."""


class CannotListen(ServiceError):
    """The address to listen on cannot be bound."""


class DatabaseUnreachable(ServiceError):
    """PostgreSQL cannot be reached at its address; `reason` is the driver's error, in one line."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
