"""Records that outlive a session: SQLite, files or memory, with checksums and encryption."""

from ._open import open_storage
from ._records import Corruption, Records
from ._storage import Keys, Namespace, Storage

__all__ = ["Corruption", "Keys", "Namespace", "Records", "Storage", "open_storage"]
