"""LISTEN on a direct connection that is never silently dead; NOTIFY through a pool.

- The connection is in autocommit mode, never in a transaction, and is always read.
- A connection that is dead, for whatever reason, is noticed within 10 s.
- It reconnects for ever; subscribers get a `Gap` for the time in between.
- A slow subscriber gets a `Gap`, and delays neither the connection nor another subscriber.
- A pooler that would lose notifications is refused.
"""

from ._events import Gap, Notification, NotifyRefused, PoolerRefused
from ._listener import Listener
from ._subscription import Subscription

__all__ = ["Gap", "Listener", "Notification", "NotifyRefused", "PoolerRefused", "Subscription"]
