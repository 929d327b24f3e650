"""The client's state of an MQTT session, which outlives a link."""

from __future__ import annotations

__all__ = ["MqttMemory"]

PACKET_IDS = 0xFFFF


class MqttMemory:
    """The client's state of one MQTT session."""

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
        #: Whether a server has accepted a link: only the first link may request a clean start.
        self.begun = False
        #: The id of the oldest send in flight at the last resumption, and how many links have ended
        #: while it alone was in flight.
        self.suspect = ""
        self.strikes = 0
        #: Whether the last resumed link had only one send in flight at a time.
        self.probing = False
        #: The packet id of the oldest send when the last link was pinged, or closed by us: that
        #: send has not caused the end of the link.
        self.outlived = 0
        #: The client id that the server has assigned, if the settings have none.
        self.client_id: str | None = None
        #: The server that we were redirected to ("host:port"), and whether it has been dialled.
        self.moved: str | None = None
        self.tried = False
        #: Unacknowledged publishes in order: packet id -> id of the send, and the packet.
        self.inflight: dict[int, tuple[str, bytes]] = {}
        #: Packet ids of received QoS 2 messages that the server has not released yet.
        #: (The keys of a dict: an empty set takes 216 bytes, an empty dict 64.)
        self.received: dict[int, None] = {}
        #: The filters that the server may have, from this process or an earlier one, sorted.
        #: (A set of one takes 216 bytes, a tuple 48.)
        self.subscribed: tuple[str, ...] = ()
        #: The filters that the session needs, if they were changed at run time.
        self.wanted: tuple[str, ...] | None = None
        #: Whether a server began a new session, and no link was ready since: the next link finds
        #: that session, but not the state of the last link that was ready.
        self.lapsed = False
        #: The last packet id.
        self.last = 0
        #: The number of sessions that servers have begun: each has its own packet ids.
        self.life = 0

    def take(self) -> int:
        """Return an unused packet id; at least one must not be in flight."""
        last, inflight = self.last, self.inflight
        while True:
            last = last % PACKET_IDS + 1
            if last not in inflight:
                self.last = last
                return last

    def forget(self) -> None:
        """Discard the state of a session that the server has not kept."""
        self.inflight.clear()
        self.received.clear()
        self.suspect = ""
        self.life += 1

    def __repr__(self) -> str:
        return f"<MqttMemory: {len(self.inflight)} in flight, {len(self.subscribed)} subscriptions>"
