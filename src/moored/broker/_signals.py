"""Draining at a signal: web servers wait for open streams before they stop an application."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moored.kernel import Tasks

from ._broker import Broker

__all__ = ["drain_on_signals"]


@contextmanager
def drain_on_signals(broker: Broker, over: float = 5.0) -> Iterator[None]:
    """Drain a broker when the process gets SIGTERM or SIGINT, while this block runs.

    uvicorn and others wait for all responses at these signals, and end the lifespan of the
    application only afterwards: use it in the lifespan. The handlers of the server are called as
    well. A signal without a handler keeps its default effect. Call it in the main thread.
    """
    loop, tasks = asyncio.get_running_loop(), Tasks()
    previous: dict[signal.Signals, Any] = {}

    def begin(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(lambda: tasks.start(broker.drain(over)))
        previous[signal.Signals(number)](number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        if callable(handler := signal.getsignal(number)):
            previous[number] = handler
            signal.signal(number, begin)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
