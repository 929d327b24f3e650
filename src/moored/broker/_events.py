"""What a broker reads from a source, and what it hands to its subscribers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from moored.kernel import MooredError

__all__ = [
    "DEFECTS",
    "BrokerError",
    "BrokerOff",
    "EventSource",
    "HistoryLost",
    "LiveEvent",
    "ReplaySource",
    "Skipped",
    "SlowSubscriber",
    "SourceEvent",
    "SourceGap",
    "StreamComment",
    "StreamReset",
    "StreamStart",
    "TooManyStreams",
]


#: Errors that are defects, and not failures of a source.
DEFECTS = (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


class BrokerError(MooredError):
    """The base class of the broker's errors."""


class BrokerOff(BrokerError):
    """The broker has no source, or is not running."""


class HistoryLost(BrokerError):
    """The history does not reach back to an event id, or does not know the id."""


class SlowSubscriber(BrokerError):
    """The subscriber did not read fast enough, and its buffer was full."""


class TooManyStreams(BrokerError):
    """The limit of open streams is reached.

    :ivar tenant: the tenant whose limit it is; None for the limit of the broker.
    """

    def __init__(self, text: str, tenant: str | None) -> None:
        super().__init__(text)
        self.tenant = tenant


class SourceEvent(NamedTuple):
    """An event as a source yields it."""

    channel: str
    payload: str
    #: The tenant in its canonical form, if the source has it apart from the payload, or an empty
    #: string if the source knows that there is none; None if the payload names the tenant.
    tenant: str | None = None
    #: The id that clients send as `Last-Event-ID`; empty if the source has no history.
    id: str = ""
    #: The place of the event in the total order of the source; comparable with all others, and
    #: hashable.
    position: Any = None


class SourceGap(NamedTuple):
    """Events may be missing before this point; every subscriber gets a reset."""

    reason: str
    #: The id to resume after from here; empty if the source has no history.
    id: str = ""


class EventSource(Protocol):
    """Yields events as they happen."""

    def events(self) -> AsyncGenerator[SourceEvent | SourceGap | None]:
        """Yield events in order.

        The first item is a `SourceGap`, yielded as soon as no later event can be missed. The broker
        calls it again after an error; it then continues with the event after the last one that
        it yielded, or yields a `SourceGap` first. None means that the source is connected again and
        has nothing to report.
        """


@runtime_checkable
class ReplaySource(Protocol):
    """Reads earlier events, in the same order and with the same ids as the live ones."""

    def position(self, id: str) -> Any:
        """Return the position of an id; raise `HistoryLost` or `ValueError` if it is not known."""

    async def read(
        self, after: Any, tenant: str, channels: frozenset[str] | None, limit: int
    ) -> list[SourceEvent]:
        """Return up to `limit` events after a position, oldest first; none if there are no more.

        Events of other tenants and channels may be among them. Raises `HistoryLost` if events after
        the position were deleted.

        :param channels: the channels that are wanted; None for all.
        """


class LiveEvent:
    """An event on its way to the subscribers of one tenant; it is encoded once for all of them."""

    __slots__ = ("_json", "_sse", "channel", "id", "payload", "position", "size", "tenant", "user")

    def __init__(
        self, channel: str, payload: str, tenant: str, id: str, position: Any, user: str = ""
    ) -> None:
        self.channel = channel
        self.payload = payload
        self.tenant = tenant
        #: The only user of the tenant who gets it; empty for all.
        self.user = user
        self.id = id
        self.position = position
        #: The bytes that count against a subscriber's buffer.
        self.size = len(payload) if payload.isascii() else len(payload.encode("utf-8", "replace"))
        self._sse: bytes | None = None
        self._json: str | None = None

    @property
    def sse(self) -> bytes:
        """The event as a server-sent event."""
        if self._sse is None:
            self._sse = sse(self.channel, self.payload, self.id)
        return self._sse

    @property
    def json(self) -> str:
        """The event as a message on a WebSocket."""
        if self._json is None:
            found = {"id": self.id, "event": self.channel, "data": self.payload}
            self._json = json.dumps(found)
        return self._json

    def __repr__(self) -> str:
        return f"<LiveEvent {self.id} on {self.channel!r} for {self.tenant}>"


class StreamReset(NamedTuple):
    """Events may be missing before this point: load the whole state again.

    :ivar id: the event id to resume after, or empty if the source has not begun.
    """

    reason: str
    id: str = ""

    @property
    def sse(self) -> bytes:
        return sse("reset", json.dumps({"reason": self.reason}), self.id)

    @property
    def json(self) -> str:
        return json.dumps({"id": self.id, "event": "reset", "data": {"reason": self.reason}})


class StreamStart(NamedTuple):
    """The beginning of a stream.

    :ivar id: the event id to resume after, if the stream ends before its first event.
    """

    id: str

    @property
    def sse(self) -> bytes:
        return sse("start", "{}", self.id)

    @property
    def json(self) -> str:
        return json.dumps({"id": self.id, "event": "start", "data": {}})


class Skipped(NamedTuple):
    """The number of events that were dropped because the subscriber's buffer was full."""

    number: int

    @property
    def sse(self) -> bytes:
        return sse("skipped", json.dumps({"count": self.number}), None)

    @property
    def json(self) -> str:
        return json.dumps({"event": "skipped", "data": {"count": self.number}})


class StreamComment(NamedTuple):
    """A comment that shows a proxy and the client that the stream is alive.

    :ivar id: the event id to resume after: an idle client then resumes from the present. A client
        of server-sent events takes it from a block without data, which is no event for it.
    """

    id: str = ""

    @property
    def sse(self) -> bytes:
        return f":keepalive\nid: {self.id}\n\n".encode() if self.id else b":keepalive\n\n"

    @property
    def json(self) -> str:
        return json.dumps({"event": "keepalive", **({"id": self.id} if self.id else {})})


def sse(event: str, data: str, id: str | None) -> bytes:
    """Return one server-sent event.

    :param id: None leaves the client's last event id unchanged, and an empty one clears it.
    """
    head = f"event: {event}\n" if id is None else f"id: {id}\nevent: {event}\n"
    if "\r" in data:
        data = data.replace("\r\n", "\n").replace("\r", "\n")
    if "\n" in data:
        data = data.replace("\n", "\ndata: ")
    return f"{head}data: {data}\n\n".encode("utf-8", "replace")
