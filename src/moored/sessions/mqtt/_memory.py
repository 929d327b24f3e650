"""The client's state of an MQTT session, which outlives a link."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MqttMemory"]

PACKET_IDS = 0xFFFF


@dataclass(slots=True, eq=False, repr=False)
class MqttMemory:
    """The client's state of one MQTT session."""

    #: Whether a server has accepted a link: only the first link may request a clean start.
    begun: bool = False
    #: The id of the oldest send in flight at the last resumption, and how many links have ended
    #: while it alone was in flight.
    suspect: str = ""
    strikes: int = 0
    #: Whether the last resumed link had only one send in flight at a time.
    probing: bool = False
    #: The packet id of the oldest send when the last link was pinged, or closed by us: that send
    #: has not caused the end of the link.
    outlived: int = 0
    #: The client id that the server has assigned, if the settings have none.
    client_id: str | None = None
    #: The server that we were redirected to ("host:port"), and whether it has been dialed.
    moved: str | None = None
    tried: bool = False
    #: Unacknowledged publishes in order: packet id -> id of the send, and the packet.
    inflight: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    #: Packet ids of received QoS 2 messages that the server has not released yet.
    #: (The keys of a dict: an empty set takes 216 bytes, an empty dict 64.)
    received: dict[int, None] = field(default_factory=dict)
    #: The filters that the server may have, from this process or an earlier one, sorted.
    #: (A set of one takes 216 bytes, a tuple 48.)
    subscribed: tuple[str, ...] = ()
    #: The filters that the session needs, if they were changed at run time.
    wanted: tuple[str, ...] | None = None
    #: Whether a server began a new session, and no link was ready since: the next link finds that
    #: session, but not the state of the last link that was ready.
    lapsed: bool = False
    #: The last packet id.
    last: int = 0
    #: The number of sessions that servers have begun: each has its own packet ids.
    life: int = 0

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
