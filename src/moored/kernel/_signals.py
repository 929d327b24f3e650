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

__all__ = ["call_on_signals"]


@contextmanager
def call_on_signals(call: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run a coroutine when the process gets SIGTERM or SIGINT, while this block runs.

    The handlers that were there are called as well, and a signal without one keeps its default
    effect. Outside of the main thread, which alone gets signals, it does nothing.
    """
    loop, tasks = asyncio.get_running_loop(), Tasks()
    previous: dict[signal.Signals, Any] = {}

    def begin(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(lambda: tasks.start(call()))
        previous[signal.Signals(number)](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(handler := signal.getsignal(number)):
                previous[number] = handler
                signal.signal(number, begin)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
