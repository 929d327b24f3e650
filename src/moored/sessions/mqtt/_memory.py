"""What outlives a link: the half of an MQTT session that the client has to keep."""

from __future__ import annotations

__all__ = ["Memory"]

PACKET_IDS = 0xFFFF
# One for all: each empty one would take 216 bytes.
_NONE: frozenset[str] = frozenset()


class Memory:
    """The client's half of one MQTT session."""

    __slots__ = (
        "begun",
        "blamed",
        "client_id",
        "inflight",
        "lapsed",
        "last",
        "life",
        "received",
        "subscribed",
    )

    def __init__(self) -> None:
        #: Whether a server has answered before: only the first link may ask for a clean start.
        self.begun = False
        #: The oldest unacknowledged publish when a server last ended a link for what we had sent.
        self.blamed = 0
        #: The client id that the server has chosen, if it was left to it.
        self.client_id: str | None = None
        #: Unacknowledged publishes in their order: packet id -> id of the send, and the packet.
        self.inflight: dict[int, tuple[str, bytes]] = {}
        #: Packet ids of received QoS 2 messages that the server has not released yet.
        #: (The keys of a dict: an empty set takes 216 bytes, an empty dict 64.)
        self.received: dict[int, None] = {}
        #: The filters that the server has granted.
        self.subscribed: frozenset[str] = _NONE
        #: Whether a server has forgotten the session, and no link was ready since: it knows the
        #: session by now, and nothing of what the last link that was ready had left with it.
        self.lapsed = False
        #: The packet id that was given last.
        self.last = 0
        #: How often a server has begun a new session: its packet ids mean something else then.
        self.life = 0

    def take(self) -> int:
        """A packet id that is not in use; there is one as long as not all are in flight."""
        last, inflight = self.last, self.inflight
        while True:
            last = last % PACKET_IDS + 1
            if last not in inflight:
                self.last = last
                return last

    def forget(self) -> None:
        """The server does not know the session any more: what it had not confirmed is lost."""
        self.inflight.clear()
        self.received.clear()
        self.subscribed = _NONE
        self.life += 1

    def __repr__(self) -> str:
        return f"<Memory: {len(self.inflight)} in flight, {len(self.subscribed)} subscriptions>"
