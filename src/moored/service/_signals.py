"""Ctrl-C and SIGTERM: the first stops in order, a second Ctrl-C forces it, a third just leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["FORCED", "Signals"]

#: What a shell shows for a program that Ctrl-C has ended.
FORCED = 128 + signal.SIGINT


class Signals:
    """The signals of this process from the beginning of `serve` to its end.

    They are taken before there is a loop, so that at no moment Ctrl-C means a traceback.
    """

    def __init__(self) -> None:
        #: Whether a second Ctrl-C came.
        self.forced = False
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._on_force: Callable[[], None] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup has ignored stays ignored. A script's background jobs begin with SIGINT
            # ignored too, but by default, not on purpose: a SIGINT that is sent to one stops it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_stop: Callable[[], None],
        on_force: Callable[[], None],
    ) -> None:
        """Call back on this loop from now on, at once for a signal that came before."""
        self._loop, self._on_stop, self._on_force = loop, on_stop, on_force
        if self._asked:
            on_stop()

    def close(self) -> None:
        """Give the signals back as they were."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number != signal.SIGINT:
            return
        self._asked += 1
        if self._asked == 1:
            self._tell(self._on_stop)
        elif self._asked == 2:
            self.forced = True
            self._tell(self._on_force)
        else:
            os._exit(FORCED)

    def _tell(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
