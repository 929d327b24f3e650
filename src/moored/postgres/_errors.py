"""The errors of this package.

::

    MooredError
    └── PostgresError
        ├── DecodeError          a message of the server violates the protocol
        ├── ConfigurationError   an operator must change something: a retry cannot succeed
        │   └── PoolerRefused    the listener's URL leads to a pooler that loses notifications
        ├── NotifyRefused        PostgreSQL does not accept a channel name or a payload
        ├── StateError           a file in state_dir cannot be read or written at the moment
        └── StreamEnded          the replication stream has ended
"""

from __future__ import annotations

from moored.kernel import MooredError


class PostgresError(MooredError):
    """The base class of the errors of `moored.postgres`."""


class DecodeError(PostgresError):
    """A message of the server violates the protocol; nothing of that message was used."""


class ConfigurationError(PostgresError):
    """A retry cannot succeed until an operator has changed what the text says."""


class StateError(PostgresError):
    """A file in the `state_dir` cannot be read or written at the moment; it was not changed."""


class StreamEnded(PostgresError):
    """The replication stream has ended."""
