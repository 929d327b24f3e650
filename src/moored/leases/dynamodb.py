"""Leases in DynamoDB.

A client is created from a URL: `moored.leases.connect("dynamodb://TABLE?region=eu-central-1")`. The
store classes are public for the methods of one layout, such as `CounterStore.sweep`.
"""

from __future__ import annotations

from moored.kernel import Clock, extra

with extra("dynamodb", "dynamodb://"):
    from ._dynamodb._config import SLOTS, DynamoConfig
    from ._dynamodb._counter import CounterStore
    from ._dynamodb._setup_help import create_command, policy
    from ._dynamodb._slots import SlotStore
    from ._dynamodb._sweep import Swept

__all__ = [
    "CounterStore",
    "DynamoConfig",
    "SlotStore",
    "Swept",
    "create_command",
    "open_store",
    "policy",
]


def open_store(url: str, *, clock: Clock) -> SlotStore | CounterStore:
    """Return the store of a `dynamodb://` URL, not yet connected."""
    config = DynamoConfig.from_url(url)
    kind = SlotStore if config.layout == SLOTS else CounterStore
    return kind(config, clock=clock)
