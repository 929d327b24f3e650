"""The connections of a manager: one shared connection for each key, and dedicated ones."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ._counters import Counters
from ._managed import ManagedConnection

__all__ = ["ConnectionTable"]

Managed = ManagedConnection[Any]


class ConnectionTable:
    """The connections of a manager; changed on its loop only."""

    def __init__(self) -> None:
        self.entries: dict[str, Managed] = {}
        #: The counters of each configured address; they outlive its connections.
        self.counters: dict[str, Counters] = {}
        #: Handlers whose connection was closed because it had no clients, by key. They are held
        #: weakly: a client that still references one reopens its connection with a call.
        self.asleep: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._by_handler: dict[int, Managed] = {}
        self._numbers = itertools.count(1)

    def dedicated_key(self, key: str) -> str:
        """Return a unique key for a connection that is not shared."""
        return f"{key}|dedicated {next(self._numbers)}"

    def add(self, managed: Managed) -> None:
        """Add a connection; its handler is no longer asleep."""
        self.asleep.pop(managed.key, None)
        self.entries[managed.key] = managed
        self._by_handler[id(managed.handler)] = managed

    def remove(self, managed: Managed) -> None:
        """Remove a connection, if it is in the table."""
        if self.entries.get(managed.key) is managed:
            del self.entries[managed.key]
        self._by_handler.pop(id(managed.handler), None)

    def detach(self, managed: Managed) -> bool:
        """Remove a connection that is to be closed; put its handler to sleep instead of closing it.

        Return False if a call has begun meanwhile.
        """
        handler = managed.handler
        if (closing := handler._detach(managed.core.generations)) is None:
            return False
        self.remove(managed)
        managed.handler = closing
        self.asleep[managed.key] = handler
        handler._own_key = managed.key if managed.dedicated else None
        return True

    def end_asleep(self, handler: Any) -> None:
        """Close a released handler that is asleep, if its connection was dedicated."""
        if handler._asleep is not None and handler._own_key is not None:
            self.asleep.pop(handler._own_key, None)
            handler._shut()

    def of(self, handler: object) -> Managed | None:
        """Return the connection of a handler, or None."""
        return self._by_handler.get(id(handler))

    def unused(self, now: float, linger: float) -> list[Managed]:
        """Return the connections that had no client, call or waiter for `linger` seconds.

        Surplus `release()` calls never affect other holders: a channel that is used stays open.
        """
        over = []
        for managed in self:
            if not managed.seems_unused or managed.handler.calls or managed.core.waiting:
                managed.unused_since = None
            elif managed.unused_since is None:
                managed.unused_since = now
            elif now - max(managed.unused_since, managed.called_at) >= linger:
                over.append(managed)
        return over

    def statistics(self, now: float) -> dict[str, Any]:
        """Return the result of `get_stats()`."""
        lines = [managed.statistics(now) for managed in self]
        total = Counters()
        for each in self.counters.values():
            total.add(each)
        dedicated = sum(line["dedicated"] for line in lines)
        return {
            "total_connections": len(lines),
            "shared_connections": len(lines) - dedicated,
            "dedicated_connections": dedicated,
            "connections": lines,
            "counters": asdict(total),
        }

    def __iter__(self) -> Iterator[Managed]:
        return iter(list(self.entries.values()))

    def __len__(self) -> int:
        return len(self.entries)
