"""A real PostgreSQL from a wheel, with no system packages: for the default, and for tests.

What holds:

- Nothing of a server outlives its owner, however the owner, the guard or the server ends.
- Half-made data never look like data, and data are made once.
- One process at a time has a data directory; another is told who that is.
- The server is reached from this machine alone, and by its password alone.
- A start that fails or is cancelled leaves nothing running.
- What the server said is in the error.
"""

from moored.embedded._directory import default_data_dir
from moored.embedded._embedded import EmbeddedPostgres, SyncEmbeddedPostgres
from moored.embedded._errors import (
    BinariesNotFound,
    DataDirectoryInUse,
    EmbeddedError,
    PortInUse,
    VersionMismatch,
)
from moored.embedded._server import Ended

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
