"""From the recorder to the open pages: each event as it comes, the newest state soon after."""

from __future__ import annotations

import asyncio
import json

from moored.kernel import Event

from ._hub import Client, Hub, message
from ._view import View

__all__ = ["Feed"]

#: Changes come in bursts (a restart is a dozen events): one state after each burst is enough.
SETTLE = 0.15
#: Numbers (positions, pools) change without an event: an open page gets them so often.
REFRESH = 5.0


class Feed:
    """A sink of the recorder that keeps every open stream up to date."""

    def __init__(self, view: View, hub: Hub) -> None:
        self.hub = hub
        self._view = view
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._refresh: asyncio.TimerHandle | None = None

    def join(self) -> Client | None:
        """A new stream, which begins with the whole state; None when there are too many."""
        client = self.hub.join()
        if client is not None:
            client.give_state(self._state())
            if self._refresh is None:
                self._refresh = self._loop.call_later(REFRESH, self._refresh_state)
        return client

    def leave(self, client: Client) -> None:
        """Forget a stream that has ended."""
        self.hub.leave(client)

    def sink(self, event: Event) -> None:
        """Take an event of the recorder; it may come from any thread."""
        if not len(self.hub):
            return
        try:
            self._loop.call_soon_threadsafe(self._publish, event)
        except RuntimeError:
            pass  # the loop is closed, and with it every stream

    def close(self) -> None:
        """Send nothing more."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._refresh is not None:
            self._refresh.cancel()
            self._refresh = None

    def _publish(self, event: Event) -> None:
        data = json.dumps(event.as_dict(), default=str)
        self.hub.publish(message("event", data, number=event.id))
        if self._due is None:
            self._due = self._loop.call_later(SETTLE, self._publish_state)

    def _publish_state(self) -> None:
        self._due = None
        if len(self.hub):
            self.hub.publish_state(self._state())

    def _refresh_state(self) -> None:
        self._refresh = None
        if len(self.hub):
            self.hub.publish_state(self._state())
            self._refresh = self._loop.call_later(REFRESH, self._refresh_state)

    def _state(self) -> bytes:
        return message("state", json.dumps(self._view.whole(), default=str))
