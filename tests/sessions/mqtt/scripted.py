"""A scripted broker, for behaviour that no real broker shows on request.

It keeps sessions, grants subscriptions and acknowledges publishes as a real broker does, until one
of its functions is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import mqtt5
from tests.stream_server import stream_server

__all__ = ["ScriptedBroker"]

GRANTED = mqtt5.SubAckReasonCode.GRANTED_QOS_AT_LEAST_ONCE


def acknowledged(packet: mqtt5.PublishPacket) -> bytes:
    """Return the PUBACK of a publish that the broker accepts."""
    assert packet.packet_id is not None
    return mqtt5.PubAckPacket(packet.packet_id).write()


class ScriptedBroker:
    """A broker on a free port of loopback."""

    def __init__(self) -> None:
        self.port = 0
        self._server = stream_server(self._serve)
        self._writers: set[asyncio.StreamWriter] = set()
        #: Client ids with a session.
        self.kept: set[str] = set()
        #: The packets that clients have sent, link by link.
        self.links: list[list[Any]] = []
        #: Returns the answer to a publish; None closes the link without an answer.
        self.on_publish: Callable[[mqtt5.PublishPacket], bytes | None] = acknowledged
        #: More options for the next CONNACKs.
        self.connack: dict[str, Any] = {}
        #: Whether a client's credentials are accepted.
        self.accepts: Callable[[mqtt5.ConnectPacket], bool] = lambda packet: True
        #: Returns the reason code for one filter.
        self.on_filter: Callable[[str], mqtt5.SubAckReasonCode] = lambda pattern: GRANTED

    @property
    def url(self) -> str:
        """Its URL."""
        return f"mqtt://127.0.0.1:{self.port}"

    def sent(self, kind: type[Any]) -> list[Any]:
        """Return the packets of one kind that clients have sent, over all links."""
        return [packet for link in self.links for packet in link if isinstance(packet, kind)]

    def payloads(self) -> list[bytes]:
        """Return the payloads of all publishes, over all links."""
        return [packet.payload for packet in self.sent(mqtt5.PublishPacket)]

    def send(self, data: bytes) -> None:
        """Send bytes on every link."""
        for writer in self._writers:
            writer.write(data)

    def cut(self) -> None:
        """Abort every link."""
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self.port = await self._server.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._server.__aexit__(*raised)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: list[Any] = []
        self.links.append(link)
        self._writers.add(writer)
        try:
            while (packet := await _packet(reader)) is not None:
                link.append(packet)
                answer = self._answer(packet)
                if answer is None:
                    return
                writer.write(answer)
        finally:
            self._writers.discard(writer)

    def _answer(self, packet: Any) -> bytes | None:
        match packet:
            case mqtt5.ConnectPacket():
                present = packet.client_id in self.kept and not packet.clean_start
                if not self.accepts(packet):
                    code = mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD
                    return mqtt5.ConnAckPacket(reason_code=code).write()
                self.kept.add(packet.client_id)
                failed = self.connack.get("reason_code")
                return mqtt5.ConnAckPacket(
                    **{"session_present": present and not failed, **self.connack}
                ).write()
            case mqtt5.SubscribePacket():
                codes = [self.on_filter(one.pattern) for one in packet.topic_filters]
                return mqtt5.SubAckPacket(packet.packet_id, codes).write()
            case mqtt5.UnsubscribePacket():
                gone = [mqtt5.UnsubAckReasonCode.SUCCESS for _ in packet.patterns]
                return mqtt5.UnsubAckPacket(packet.packet_id, gone).write()
            case mqtt5.PublishPacket():
                return self.on_publish(packet)
            case mqtt5.PingReqPacket():
                return mqtt5.PingRespPacket().write()
            case mqtt5.DisconnectPacket():
                return None
        return b""


async def _packet(reader: asyncio.StreamReader) -> Any:
    head = await reader.read(1)
    if not head:
        return None
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        head += bytes((byte,))
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    packet, _ = mqtt5.read(memoryview(head + await reader.readexactly(size)))
    return packet
