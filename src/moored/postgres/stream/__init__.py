"""The replication connection, and the client that streams over it."""

from ._collector import LogCollector
from ._link import KEEPALIVES
from ._published import Published
from ._replication import ReceivedTotals, ReplicationClient

__all__ = [
    "KEEPALIVES",
    "LogCollector",
    "Published",
    "ReceivedTotals",
    "ReplicationClient",
]
