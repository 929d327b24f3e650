"""PyMilvus's clients over shared channels: change one import.

::

    # from pymilvus import MilvusClient
    from moored.rpc.milvus import MilvusClient

    client = MilvusClient("https://user:pass@vectors:19530/mydb")
    client.search("articles", [vector], limit=5, timeout=30)    # also while the server restarts

They *are* PyMilvus's own clients, with all of their methods; what they call goes over a channel
that all clients of one server and one identity share, and that outlives the server's restarts.

What always holds, besides what holds for every channel (`moored.rpc`):

- a client that is closed, or forgotten, takes nothing from another one;
- a call with a `timeout` fails for want of a connection only when that time is over;
- the name of the database belongs to a client, not to the channel.
"""

from moored.kernel import extra

with extra("milvus", "moored.rpc.milvus"):
    import pymilvus as _pymilvus  # type: ignore[import-untyped]  # noqa: F401

from ._client import (
    AsyncMilvusClient,
    AsyncMilvusManager,
    MilvusClient,
    MilvusManager,
    MilvusRefused,
    MilvusUnreachable,
)
from ._config import MilvusConfigError, milvus_config
from ._wire import milvus_credentials, milvus_probe, milvus_unavailable

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Clients
    "AsyncMilvusClient",
    "MilvusClient",
    # What they share
    "AsyncMilvusManager",
    "MilvusManager",
    "milvus_config",
    # How a manager speaks with Milvus
    "milvus_credentials",
    "milvus_probe",
    "milvus_unavailable",
    # Errors
    "MilvusConfigError",
    "MilvusRefused",
    "MilvusUnreachable",
]
