"""Callbacks for events: each gets every event in order, and their errors are logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Observers"]

log = logging.getLogger("moored.kernel")

T = TypeVar("T")


class Observers(Generic[T]):
    """The callbacks for one kind of event.

    An error of a callback is counted each time and logged the first time. `notify` delivers events
    that a callback causes after the current one, so that all callbacks see the same order;
    `deliver` calls the callbacks at once, and may be used from any thread.
    """

    __slots__ = ("_broken", "_notifying", "_of", "_waiting", "callbacks", "errors")

    def __init__(self, of: str) -> None:
        self._of = of
        #: The callbacks, in the order in which they were added.
        self.callbacks: tuple[Callable[[T], None], ...] = ()
        self._broken: tuple[Callable[[T], None], ...] = ()
        # A list: there is rarely more than one, and a deque takes 600 bytes for none.
        self._waiting: list[T] = []
        self._notifying = False
        #: How often a callback raised.
        self.errors = 0

    def add(self, callback: Callable[[T], None]) -> Callable[[], None]:
        """Add a callback; returns a function that removes it."""
        self.callbacks = (*self.callbacks, callback)

        def remove() -> None:
            self.callbacks = tuple(other for other in self.callbacks if other is not callback)
            self._broken = tuple(other for other in self._broken if other != callback)

        return remove

    def notify(self, event: T) -> None:
        """Call every callback with the event."""
        if not self.callbacks:
            return
        self._waiting.append(event)
        if self._notifying:
            return
        self._notifying = True
        try:
            while self._waiting:
                self.deliver(self._waiting.pop(0))
        finally:
            self._notifying = False

    def deliver(self, event: T) -> None:
        """Call every callback with the event, now."""
        for callback in self.callbacks:
            try:
                callback(event)
            except Exception as error:
                self.errors += 1
                if callback not in self._broken:
                    self._broken = (*self._broken, callback)
                    log.error("the callback %r of %s raised", callback, self._of, exc_info=error)
