"""The replication connection, and the client that streams over it."""

from ._collector import LogCollector
from ._link import KEEPALIVES
from ._replication import ReceivedTotals, ReplicationClient

__all__ = [
    "KEEPALIVES",
    "LogCollector",
    "ReceivedTotals",
    "ReplicationClient",
]
