"""The endpoints of a manager: one that is shared for each key, and those that a client owns."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ._counters import Counters
from ._endpoint import Endpoint

__all__ = ["Table"]


class Table:
    """The endpoints of a manager. Any thread may add one that rests; the loop does the rest.

    While an endpoint changes its place it is in both, so that `all` finds it also in the child of a
    fork that happened in between.
    """

    def __init__(self) -> None:
        #: The endpoints that have a connection, or need one, by key.
        self.awake: dict[str, Endpoint] = {}
        #: Those that rest, held weakly: someone who still has the channel may call over it.
        self.asleep: weakref.WeakValueDictionary[str, Endpoint] = weakref.WeakValueDictionary()
        #: The counters of each configured address; they outlive its endpoints.
        self.counters: dict[str, Counters] = {}
        self._numbers = itertools.count(1)
        self.unlock()

    def unlock(self) -> None:
        """Make a new lock: in the child of a fork, a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def dedicated_key(self, key: str) -> str:
        """Return a unique key for an endpoint that is not shared."""
        return f"{key}|dedicated {next(self._numbers)}"

    def find_or_make(self, key: str, make: Callable[[], Endpoint]) -> Endpoint:
        """Return the endpoint with this key; without one, make one that rests."""
        made: Endpoint | None = None
        while True:
            with self._lock:
                found = self.awake.get(key) or self.asleep.get(key)
                if found is not None and not found.closed:
                    return found
                if made is not None:
                    self.asleep[key] = made
                    return made
            made = make()  # outside of the lock: it runs a function of the user's

    def wake(self, endpoint: Endpoint) -> None:
        """Note that an endpoint is no longer resting."""
        with self._lock:
            self.awake[endpoint.key] = endpoint
            self.asleep.pop(endpoint.key, None)

    def rest(self, endpoint: Endpoint) -> None:
        """Note that an endpoint rests."""
        with self._lock:
            self.asleep[endpoint.key] = endpoint
            if self.awake.get(endpoint.key) is endpoint:
                del self.awake[endpoint.key]

    def remove(self, endpoint: Endpoint) -> None:
        """Remove an endpoint that was closed."""
        with self._lock:
            if self.awake.get(endpoint.key) is endpoint:
                del self.awake[endpoint.key]
            if self.asleep.get(endpoint.key) is endpoint:
                del self.asleep[endpoint.key]

    def all(self) -> list[Endpoint]:
        """Return all endpoints, also those that rest."""
        with self._lock:
            return [*self.awake.values(), *self.asleep.values()]

    def statistics(self, now: float) -> dict[str, Any]:
        """Return the result of `get_stats()`."""
        lines = [each.statistics(each.handler.gate.used_at, now) for each in self]
        total = Counters()
        for each in list(self.counters.values()):
            total.add(each)
        dedicated = sum(line["dedicated"] for line in lines)
        return {
            "total_connections": len(lines),
            "shared_connections": len(lines) - dedicated,
            "dedicated_connections": dedicated,
            "connections": lines,
            "counters": asdict(total),
        }

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(list(self.awake.values()))

    def __len__(self) -> int:
        return len(self.awake)
