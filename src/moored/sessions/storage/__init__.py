"""Records that outlive a session: SQLite, files or memory, with checksums and encryption."""

from ._records import Corruption, Records
from ._storage import Keys, Namespace, Storage, open_storage

__all__ = ["Corruption", "Keys", "Namespace", "Records", "Storage", "open_storage"]
