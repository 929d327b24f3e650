"""Draining at a signal: web servers wait for open streams before they stop an application."""

from __future__ import annotations

from contextlib import AbstractContextManager

from moored.kernel import call_on_signals

from ._broker import Broker

__all__ = ["drain_on_signals"]


def drain_on_signals(broker: Broker, over: float = 5.0) -> AbstractContextManager[None]:
    """Drain a broker when the process gets SIGTERM or SIGINT, while this block runs.

    uvicorn and others wait for all responses at these signals, and end the lifespan of the
    application only afterwards: use it in the lifespan. The handlers of the server are called as
    well. The lifespan of a `moored.App` does it for the brokers of the app.
    """
    return call_on_signals(lambda: broker.drain(over))
