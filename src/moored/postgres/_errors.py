"""What can go wrong with a Postgres connection, and what to do about it.

::

    MooredError
    └── PostgresError
        ├── DecodeError          a message of the server violates the protocol
        ├── ConfigurationError   trying again cannot help: something must be changed first
        ├── StateError           the file that keeps how far consumers are cannot be used right now
        └── StreamEnded          the stream is over, because the connection or the manager is
"""

from __future__ import annotations

from moored.kernel import MooredError

__all__ = [
    "ConfigurationError",
    "DecodeError",
    "PostgresError",
    "StateError",
    "StreamEnded",
]


class PostgresError(MooredError):
    """Something that `moored.postgres` raises on purpose."""


class DecodeError(PostgresError):
    """A message of the server violates the protocol; nothing of it was used."""


class ConfigurationError(PostgresError):
    """Retrying cannot succeed until the configuration, as the text says, is changed."""


class StateError(PostgresError):
    """A file of the `state_dir` cannot be read or written right now; nothing of it was changed."""


class StreamEnded(PostgresError):
    """The replication stream has ended."""
