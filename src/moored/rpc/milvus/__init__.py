"""PyMilvus's clients over shared channels: change one import.

::

    # from pymilvus import MilvusClient
    from moored.rpc.milvus import MilvusClient

    client = MilvusClient("https://user:pass@vectors:19530/mydb")
    client.search("articles", [vector], limit=5, timeout=30)    # also while the server restarts

They are subclasses of PyMilvus's clients, with all of their methods. Their calls go over a channel
that all clients of one server and one identity share, and that survives restarts of the server.

Invariants, besides those of every channel (`moored.rpc`):

- closing or dropping a client does not affect other clients;
- a call without a connection fails only when its `timeout` expires;
- the database name belongs to a client, not to the channel.
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
from ._config import MilvusConfig, MilvusConfigError, milvus_config
from ._topology import MilvusTopology
from ._wire import milvus_credentials, milvus_probe, milvus_unavailable

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # Clients
    "AsyncMilvusClient",
    "MilvusClient",
    # Managers and configuration
    "AsyncMilvusManager",
    "MilvusConfig",
    "MilvusManager",
    "MilvusTopology",
    "milvus_config",
    # Options for a manager that connects to Milvus
    "milvus_credentials",
    "milvus_probe",
    "milvus_unavailable",
    # Errors
    "MilvusConfigError",
    "MilvusRefused",
    "MilvusUnreachable",
]
