"""Draining at a signal: web servers wait for open streams before they stop an application."""

from __future__ import annotations

from contextlib import AbstractContextManager

from moored.kernel import call_on_signals

from ._broker import Broker

__all__ = ["drain_on_signals"]


def drain_on_signals(broker: Broker, over: float = 5.0) -> AbstractContextManager[None]:
    """Drain a broker when the process gets SIGTERM or SIGINT, while this block runs.

    `BrokerApp` does that by itself. Use it in the lifespan of an application whose own endpoints
    use `broker.subscribe()`: web servers wait for their responses, and end the lifespan afterwards.
    The handlers of the server are called as well. A program that goes on accepts new streams again
    after ten seconds.
    """
    return call_on_signals(lambda: broker.drain_at_signal(over))
