"""Sends the recorder's events to the browser streams at once, and the newest state soon after."""

from __future__ import annotations

import asyncio
import json

from moored.kernel import Event, Timers

from ._browser_streams import BrowserStream, BrowserStreams, message
from ._view import View

__all__ = ["Feed"]

#: Seconds from an event to the next state: a restart is a burst of a dozen events.
SETTLE = 0.15
#: The least pause between two states, as a multiple of the time that the last one took to make:
#: with thousands of components, the page must not take the time of the service.
PAUSE = 10.0
#: Seconds between two states without events: numbers such as positions change without an event.
REFRESH = 2.0


class Feed:
    """A sink of the recorder that updates every open stream."""

    def __init__(self, view: View, streams: BrowserStreams) -> None:
        self.streams = streams
        self._view = view
        self._loop = asyncio.get_running_loop()
        self._timers = Timers(view.clock)
        self._pause_until = 0.0

    def join(self) -> BrowserStream | None:
        """Open a stream that begins with the whole state; return None if there are too many."""
        state = self._state()  # before the stream is opened, in case this fails
        client = self.streams.join()
        if client is not None:
            client.give_state(state)
            self._send_state_within(REFRESH)
        return client

    def sink(self, event: Event) -> None:
        """Send an event of the recorder to every stream; may be called from any thread."""
        if not len(self.streams):
            return
        try:
            self._loop.call_soon_threadsafe(self._publish, event)
        except RuntimeError:
            pass  # the loop is closed, and with it every stream

    def close(self) -> None:
        """Cancel the scheduled updates."""
        self._timers.cancel_all()

    def _publish(self, event: Event) -> None:
        data = json.dumps(event.as_dict(), default=str)
        self.streams.publish(message("event", data, number=event.id))
        self._send_state_within(SETTLE)

    def _send_state_within(self, seconds: float) -> None:
        at = max(self._view.clock.monotonic() + seconds, self._pause_until)
        planned = self._timers.at("state")
        if planned is None or at < planned:
            self._timers.set("state", at, self._send_state)

    def _send_state(self) -> None:
        if len(self.streams):
            self._send_state_within(REFRESH)
            self.streams.publish_state(self._state())

    def _state(self) -> bytes:
        began = self._view.clock.monotonic()
        state = message("state", json.dumps(self._view.as_dict(), default=str))
        now = self._view.clock.monotonic()
        self._pause_until = now + PAUSE * (now - began)
        return state
