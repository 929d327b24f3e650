"""Those who want to be told: each hears everything, in order, and none can break the teller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Observers"]

log = logging.getLogger("moored.kernel")

T = TypeVar("T")


class Observers(Generic[T]):
    """Callbacks of one kind of news.

    An observer that raises is counted each time and reported the first time. One that causes
    further news by what it does is not overtaken by them: they are told after the present ones,
    so that all observers see the same order.
    """

    __slots__ = ("_broken", "_callbacks", "_of", "_telling", "_waiting", "errors")

    def __init__(self, of: str) -> None:
        self._of = of
        self._callbacks: tuple[Callable[[T], None], ...] = ()
        self._broken: tuple[Callable[[T], None], ...] = ()
        # A list: there is rarely more than one, and a deque takes 600 bytes for none.
        self._waiting: list[T] = []
        self._telling = False
        #: Times that an observer raised.
        self.errors = 0

    def add(self, callback: Callable[[T], None]) -> Callable[[], None]:
        """Tell this one too; returns what ends that."""
        self._callbacks = (*self._callbacks, callback)

        def remove() -> None:
            self._callbacks = tuple(other for other in self._callbacks if other is not callback)
            self._broken = tuple(other for other in self._broken if other != callback)

        return remove

    def tell(self, news: T) -> None:
        """Call every observer with the news."""
        if not self._callbacks:
            return
        self._waiting.append(news)
        if self._telling:
            return
        self._telling = True
        try:
            while self._waiting:
                self._tell_all(self._waiting.pop(0))
        finally:
            self._telling = False

    def __len__(self) -> int:
        return len(self._callbacks)

    def _tell_all(self, news: T) -> None:
        for callback in self._callbacks:
            try:
                callback(news)
            except Exception as error:
                self.errors += 1
                if callback not in self._broken:
                    self._broken = (*self._broken, callback)
                    log.error("observer %r of %s failed", callback, self._of, exc_info=error)
