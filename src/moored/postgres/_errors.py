"""What can go wrong with a Postgres connection, and what to do about it.

::

    MooredError
    └── PostgresError
        ├── ProtocolError        the server said something that its protocol does not allow
        ├── ConfigurationError   trying again cannot help: something must be changed first
        └── StreamEnded          the stream is over, because the connection or the manager is
"""

from __future__ import annotations

from moored.kernel import MooredError

__all__ = ["ConfigurationError", "PostgresError", "ProtocolError", "StreamEnded"]


class PostgresError(MooredError):
    """Something that `moored.postgres` raises on purpose."""


class ProtocolError(PostgresError):
    """The server said something that its protocol does not allow; nothing of it was used."""


class ConfigurationError(PostgresError):
    """Trying again cannot help: the text says what to change."""


class StreamEnded(PostgresError):
    """The stream is over."""
