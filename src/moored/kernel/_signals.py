"""A call at SIGTERM and SIGINT, besides the handlers of the web server or program around it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ._tasks import Tasks

__all__ = ["SignalCall", "call_on_signals"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalCall:
    """A coroutine that runs when the process gets SIGTERM or SIGINT, while this is active.

    The handlers that were there are called as well, and a signal without one keeps its default
    effect. Outside of the main thread, which alone gets signals, it does nothing.

    Some servers install their handlers before they start an application, and others afterwards:
    `activate()` may be called again, and then puts the call before a handler that was installed
    meanwhile.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._call = call
        self._tasks = Tasks()
        self._loop: asyncio.AbstractEventLoop | None = None

    def activate(self) -> None:
        """Run the coroutine at signals, on the running loop."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        _active[self] = None
        for number in SIGNALS:
            found = signal.getsignal(number)
            if callable(found) and not isinstance(found, _Handler):
                signal.signal(number, _Handler(found))

    def deactivate(self) -> None:
        """Run the coroutine no more; the last call restores the previous handlers."""
        if _active.pop(self, self) is self or _active:
            return
        for number in SIGNALS:
            # A handler that was installed later stays, and may go on to call the one here.
            if isinstance(found := signal.getsignal(number), _Handler):
                signal.signal(number, found.previous)

    def _run(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: self._tasks.start(self._call()))


class _Handler:
    """Runs all active calls, then the handler that was installed before."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for each in list(_active):
            each._run()
        self.previous(number, frame)


#: Signal handlers belong to the process, and so do these.
_active: dict[SignalCall, None] = {}


@contextmanager
def call_on_signals(call: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run a coroutine when the process gets SIGTERM or SIGINT, while this block runs."""
    made = SignalCall(call)
    made.activate()
    try:
        yield
    finally:
        made.deactivate()
