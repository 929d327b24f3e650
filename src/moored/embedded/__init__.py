"""A real PostgreSQL from a wheel, without system packages: the default database, and for tests.

Invariants:

- No process of a server outlives its owner, however the owner, the guard or the server ends.
- A data directory appears only when it is complete, and is created once.
- One process at a time uses a data directory; the error of a second one names the first.
- The server accepts connections only from this machine, and only with its password.
- A start that fails or is cancelled leaves no process behind.
- An error contains the last lines of the server's log.
"""

from ._directory import default_data_dir
from ._embedded import EmbeddedPostgres, SyncEmbeddedPostgres
from ._errors import (
    BinariesNotFound,
    DataDirectoryInUse,
    EmbeddedError,
    PortInUse,
    VersionMismatch,
)
from ._server import Ended

__all__ = [
    "BinariesNotFound",
    "DataDirectoryInUse",
    "EmbeddedError",
    "EmbeddedPostgres",
    "Ended",
    "PortInUse",
    "SyncEmbeddedPostgres",
    "VersionMismatch",
    "default_data_dir",
]
