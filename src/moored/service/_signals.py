"""Ctrl-C and SIGTERM: the first stops in order, a second Ctrl-C forces it, a third exits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["FORCED", "Signals"]

#: The exit code that shells use for a program that Ctrl-C has ended.
FORCED = 128 + signal.SIGINT


class Signals:
    """The signal handlers of this process while `serve` runs.

    They are installed before there is a loop, so that Ctrl-C never prints a traceback.
    """

    def __init__(self) -> None:
        #: Whether there was a second Ctrl-C.
        self.forced = False
        self._requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._on_force: Callable[[], None] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A SIGHUP that nohup has set to be ignored stays ignored. Shells also ignore SIGINT in
            # background jobs of a script, but only by default: a SIGINT sent to one stops it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_stop: Callable[[], None],
        on_force: Callable[[], None],
    ) -> None:
        """Set the callbacks, which run on this loop; call `on_stop` if a signal came before."""
        self._loop, self._on_stop, self._on_force = loop, on_stop, on_force
        if self._requests:
            on_stop()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requests and number != signal.SIGINT:
            return
        self._requests += 1
        if self._requests == 1:
            self._post(self._on_stop)
        elif self._requests == 2:
            self.forced = True
            self._post(self._on_force)
        else:
            os._exit(FORCED)

    def _post(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
