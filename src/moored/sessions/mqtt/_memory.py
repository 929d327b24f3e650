"""What outlives a link: the half of an MQTT session that the client has to keep."""

from __future__ import annotations

__all__ = ["MqttMemory"]

PACKET_IDS = 0xFFFF


class MqttMemory:
    """The client's half of one MQTT session."""

    __slots__ = (
        "begun",
        "client_id",
        "inflight",
        "lapsed",
        "last",
        "life",
        "moved",
        "outlived",
        "probing",
        "received",
        "strikes",
        "subscribed",
        "suspect",
        "tried",
        "wanted",
    )

    def __init__(self) -> None:
        #: Whether a server has answered before: only the first link may ask for a clean start.
        self.begun = False
        #: The id of the oldest send when a link was resumed last, and how many links have ended
        #: while it alone was in flight, right after it was written.
        self.suspect = ""
        self.strikes = 0
        #: Whether the last link that was resumed wrote one send at a time.
        self.probing = False
        #: The packet id of the oldest send when the last link was asked for a sign of life, or left
        #: by us: the end of that link is not its fault.
        self.outlived = 0
        #: The client id that the server has chosen, if it was left to it.
        self.client_id: str | None = None
        #: Where a server has sent us ("host:port"), and whether that was dialled without success.
        self.moved: str | None = None
        self.tried = False
        #: Unacknowledged publishes in their order: packet id -> id of the send, and the packet.
        self.inflight: dict[int, tuple[str, bytes]] = {}
        #: Packet ids of received QoS 2 messages that the server has not released yet.
        #: (The keys of a dict: an empty set takes 216 bytes, an empty dict 64.)
        self.received: dict[int, None] = {}
        #: The filters that the server may have: what this process, or one before it, has asked for.
        #: (Sorted: a set of one takes 216 bytes, a tuple 48.)
        self.subscribed: tuple[str, ...] = ()
        #: The filters that the session wants, if that was changed at run time.
        self.wanted: tuple[str, ...] | None = None
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
        self.suspect = ""
        self.life += 1

    def __repr__(self) -> str:
        return f"<MqttMemory: {len(self.inflight)} in flight, {len(self.subscribed)} subscriptions>"
