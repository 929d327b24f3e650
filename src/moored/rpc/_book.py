"""Which connections there are: one for each key, and those that are dedicated."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from ._counters import Counters, Ledger
from ._managed import ManagedConnection

__all__ = ["Book"]

Managed = ManagedConnection[Any]


class Book:
    """The connections of a manager; its lock is the manager's."""

    def __init__(self) -> None:
        self.entries: dict[str, Managed] = {}
        #: What was counted, by the address that was asked for.
        self.ledger = Ledger()
        #: Handlers whose connection was closed because nobody had it, by its key; for as long as
        #: somebody does hold them.
        self.asleep: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._by_handler: dict[int, Managed] = {}
        self._numbers = itertools.count(1)

    def dedicated_key(self, key: str) -> str:
        """A key that nobody shares."""
        return f"{key}|dedicated {next(self._numbers)}"

    def counters_of(self, address: str) -> Counters:
        """Those of an address."""
        return self.ledger.of(address, lambda: {each.config.address for each in self})

    def add(self, managed: Managed) -> None:
        """Write it down; it is awake."""
        self.asleep.pop(managed.key, None)
        self.entries[managed.key] = managed
        self._by_handler[id(managed.handler)] = managed

    def remove(self, managed: Managed) -> None:
        """Strike it out, if it is still there."""
        if self.entries.get(managed.key) is managed:
            del self.entries[managed.key]
        self._by_handler.pop(id(managed.handler), None)

    def part(self, managed: Managed) -> bool:
        """Leave the handler to whoever holds it, and strike the connection out, to be closed.

        Says whether that is so: a call may have begun.
        """
        handler = managed.handler
        if (heir := handler._part(managed.generation)) is None:
            return False
        self.remove(managed)
        managed.handler = heir
        self.asleep[managed.key] = handler
        handler._own_key = managed.key if managed.dedicated else None
        return True

    def end_asleep(self, handler: Any) -> None:
        """Somebody gives back one that is asleep: if it was dedicated, that is its end."""
        if handler._asleep is not None and handler._own_key is not None:
            self.asleep.pop(handler._own_key, None)
            handler._shut()

    def of(self, handler: object) -> Managed | None:
        """The connection of a handler."""
        return self._by_handler.get(id(handler))

    def deserted(self, now: float, linger: float) -> list[Managed]:
        """Those that nobody has had for so long; whoever is left alone is noted.

        Nor used, nor waited for: who holds a channel of which others have said too often that they
        give it back goes on with it undisturbed.
        """
        over = []
        for managed in self:
            if not managed.deserted or managed.handler.calls or managed.core.waiting:
                managed.deserted_at = None
            elif managed.deserted_at is None:
                managed.deserted_at = now
            elif now - max(managed.deserted_at, managed.called_at) >= linger:
                over.append(managed)
        return over

    def statistics(self, now: float) -> dict[str, Any]:
        """What `get_stats()` tells."""
        lines = [managed.statistics(now) for managed in self]
        dedicated = sum(line["dedicated"] for line in lines)
        return {
            "total_connections": len(lines),
            "shared_connections": len(lines) - dedicated,
            "dedicated_connections": dedicated,
            "connections": lines,
            "counters": self.ledger.total().as_dict(),
        }

    def __iter__(self) -> Iterator[Managed]:
        return iter(list(self.entries.values()))

    def __len__(self) -> int:
        return len(self.entries)
