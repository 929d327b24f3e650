"""One MQTT link, from CONNECT to DISCONNECT, without any I/O.

::

    connecting ──CONNACK──▶ subscribing ──SUBACK──▶ open ──▶ closed
         │                                           ▲
         └── CONNACK, all subscriptions still known ─┘

`Ready` comes after the SUBACK, so that whoever waited for it misses nothing that is sent to it from
then on; a resumed session whose subscriptions the server still has is ready at once. What the
server kept for us comes right behind its CONNACK, so inbound messages may come before `Ready`.

What always holds:

- a packet id is never 0 and never given while it is in flight;
- no more is unacknowledged on a link than the server's receive maximum;
- acknowledgements are sent in the order in which the messages came, whoever handled them first;
- a packet before a bad one in the same chunk counts: its events come first, then the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .._content import Text
from .._errors import ProtocolError, StepFailed
from .._protocol import (
    Closing,
    Confirmed,
    Dialogue,
    Greeting,
    Happening,
    Incoming,
    Outgoing,
    Progress,
    Ready,
    Refused,
    Unhandled,
)
from . import _packets as packets
from ._codec import broken, malformed
from ._frames import Frames
from ._memory import Memory
from ._packets import Message
from ._plan import Plan, lacks
from ._reasons import FAILURE, close_class, words_of

__all__ = ["MqttDialogue"]

PROGRESS: Final = Progress()
#: By so much may a server that resumes exceed our receive maximum: Mosquitto does not count what it
#: sends again. To close the link for it would only make it send all of them again. What is beyond
#: even that is left to the next link, which we ask for when all before it is acknowledged.
OVERRUN: Final = 900
#: A server that ends a link with one of these does so for something that it was sent.
BLAMES: Final = frozenset((0x81, 0x82, 0x90, 0x95, 0x99))


class MqttDialogue(Dialogue):
    """One link of one session."""

    __slots__ = (
        "_arrived",
        "_asked",
        "_frames",
        "_held",
        "_largest",
        "_left",
        "_memory",
        "_phase",
        "_plan",
        "_present",
        "_ready",
        "_retain",
        "_window",
    )

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._plan = plan
        self._memory = memory
        self._frames = Frames(plan.max_packet_size)
        self._phase = "connecting"
        self._window = plan.window
        # The largest packet that the server takes, and whether it keeps retained ones.
        self._largest = packets.LARGEST
        self._retain = True
        # The SUBSCRIBE that waits for its answer: packet id, and what it asks for.
        self._asked: tuple[int, list[tuple[str, str]]] = (0, [])
        self._ready = Ready()
        # Whether the server knew the session.
        self._present = False
        # Unacknowledged publishes of the last link that the receive maximum keeps back.
        self._held: list[int] = []
        # What came and is not acknowledged yet, in order: packet id -> QoS, negative once handled.
        self._arrived: dict[int, int] = {}
        # Whether more came than there is room for.
        self._left = False

    @property
    def room(self) -> int:
        """How many more sends may be written now."""
        return self._window - len(self._memory.inflight)

    # -- what we say ---------------------------------------------------------------------------

    def hello(self) -> bytes:
        """CONNECT."""
        return self._plan.hello

    def write(self, outgoing: Outgoing) -> bytes:
        """PUBLISH with QoS 1. What the server would not take raises `StepFailed`, unwritten."""
        memory = self._memory
        if self._phase != "open":
            raise StepFailed(f"the link is {self._phase}")
        if len(memory.inflight) >= self._window:
            raise StepFailed(f"the server takes no more than {self._window} unconfirmed sends")
        body = outgoing.content if outgoing.body is None else outgoing.body
        topic = outgoing.recipient.join(self._plan.topic)
        try:
            address = topic.encode()
            wild = "+" in topic or "#" in topic or "\0" in topic
            if wild or not 0 < len(address) <= 0xFFFF:
                raise ValueError("a topic has 1 to 65535 bytes, and no +, # or NUL")
            number = memory.take()
            if type(body) is bytes:
                data = packets.publish(address, number, outgoing.id, body)
            else:
                data = self._rich(address, number, outgoing.id, body)
        except Exception as error:  # a `Message` may have anything in it
            raise StepFailed(f"it cannot be sent over MQTT: {error}") from error
        if len(data) > self._largest:
            raise StepFailed(
                f"it makes a packet of {len(data)} bytes, and the server takes {self._largest}"
            )
        memory.inflight[number] = (outgoing.id, data if self._plan.resumes else b"")
        return data

    def check(self, outgoing: Outgoing) -> None:
        """Raise `StepFailed` for what no server would take; for a dialogue without a link."""
        self._phase = "open"
        self.write(outgoing)

    def _rich(self, address: bytes, number: int, id: str, body: Any) -> bytes:
        """A send that is more than bytes."""
        if isinstance(body, Text):
            body = body.text
        if not isinstance(body, Message):
            payload, is_text = packets.as_bytes(body)
            return packets.publish(address, number, id, payload, packets.TEXT_MARK * is_text)
        if body.retain and not self._retain:
            raise ValueError("the server keeps no retained messages")
        payload, is_text = packets.as_bytes(body.payload)
        more = packets.more_properties(body, is_text)
        data = packets.publish(address, number, id, payload, more)
        return bytes((data[0] | 1,)) + data[1:] if body.retain else data

    def resend(self) -> Iterable[tuple[str, bytes]]:
        """The unacknowledged publishes, marked as duplicates, in order.

        Those beyond the receive maximum come with no bytes: they are written by and by, as
        acknowledgements make room.
        """
        inflight = self._memory.inflight
        numbers = list(inflight)
        self._held = numbers[self._window :][::-1]
        for place, number in enumerate(numbers):
            id, data = inflight[number]
            yield id, _again(data) if place < self._window else b""

    def ping(self) -> bytes:
        """PINGREQ."""
        return packets.PINGREQ

    def acknowledge(self, token: Any) -> bytes:
        """PUBACK (or PUBREC), for this and for all that waited for it to be handled."""
        arrived = self._arrived
        qos = arrived.get(token, 0)
        if qos <= 0 or self._phase == "closed":
            return b""
        arrived[token] = -qos
        ready = []
        for number, qos in arrived.items():
            if qos > 0:
                break
            ready.append(number)
        data = b"".join([self._settle(number) for number in ready])
        if self._left and not arrived:
            self._phase = "closed"
            farewell = data + packets.disconnect()
            raise ProtocolError(
                "more came than there was room for: a new link brings the rest", farewell
            )
        return data

    def _settle(self, number: int) -> bytes:
        if self._arrived.pop(number) == -1:
            return packets.answer(packets.PUBACK, number)
        self._memory.received[number] = None
        return packets.answer(packets.PUBREC, number)

    def goodbye(self) -> bytes:
        """DISCONNECT."""
        return self._plan.goodbye

    # -- what we hear --------------------------------------------------------------------------

    def feed(self, data: bytes) -> Iterator[Incoming]:
        """Bytes have come in; each packet is read when the events of the last one were handled."""
        inflight = self._memory.inflight
        if self._phase == "closed":
            return
        try:
            for first, chunk, at, end in self._frames.cut(data):
                if first == packets.PUBACK and end - at == 2 and self._phase == "open":
                    # The shortest way, for what comes most: a plain acknowledgement.
                    number = chunk[at] << 8 | chunk[at + 1]
                    if number in inflight and not self._held:
                        yield Confirmed(inflight.pop(number)[0])
                        continue
                yield from self._read(first, chunk, at, end)
                if self._phase == "closed":
                    return
        except ProtocolError:
            self._phase = "closed"
            raise

    def _read(self, first: int, data: bytes, at: int, end: int) -> list[Incoming]:
        events: list[Incoming] = []
        kind = first & 0xF0
        if self._phase == "connecting" and kind not in (packets.CONNACK, packets.DISCONNECT):
            raise broken(0x82, "the server speaks before its CONNACK")
        if kind == packets.PUBLISH:
            self._publish(first, data, at, end, events)
            return events
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise broken(0x82, f"a packet of type {first >> 4}, which has no place here")
        if first != (packets.PUBREL if kind == 0x60 else kind):
            raise malformed(f"a packet of type {first >> 4} with wrong flags")
        handler(self, data, at, end, events)
        return events

    # -- the connection ------------------------------------------------------------------------

    def _connack(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        if self._phase != "connecting":
            raise broken(0x82, "a second CONNACK")
        present, code, options = packets.read_connack(data, at, end)
        if code:
            if code < FAILURE:
                raise broken(0x82, f"a CONNACK with code {code}")
            self._end(code, options, events)
            return
        if present and self._plan.clean:
            raise broken(0x82, "a session is present after a clean start")
        if "authentication_method" in options:
            raise broken(0x82, "an authentication that nobody asked for")
        if not options.get("maximum_qos", 1):
            self._end(0x9B, options, events, farewell=packets.disconnect())
            return
        memory = self._memory
        memory.begun = True
        memory.client_id = options.get("assigned_client_identifier", memory.client_id)
        if not present:
            memory.forget()
            memory.lapsed = True
        self._present = present
        self._window = min(self._plan.window, options.get("receive_maximum", 0xFFFF))
        self._largest = options.get("maximum_packet_size", packets.LARGEST)
        self._retain = bool(options.get("retain_available", 1))
        # To ask more often than the server wants is always allowed.
        told = options.get("server_keep_alive") or math.inf
        keepalive = float(told) if told < (self._plan.keepalive or math.inf) else None
        keeps = options.get("session_expiry_interval") != 0
        self._ready = Ready(not memory.lapsed, self._window, keepalive, keeps)
        self._subscribe(options, events)

    def _subscribe(self, options: Any, events: list[Incoming]) -> None:
        """Ask for what the server does not have yet, and can have."""
        wanted = []
        for text, words in self._plan.filters:
            if text in self._memory.subscribed:
                continue
            if code := lacks(text, options):
                events.append(Unhandled(f"no subscription to {words}: {words_of(code)}"))
            else:
                wanted.append((text, words))
        if not wanted:
            self._open(events)
            return
        number = self._memory.take()
        data = packets.subscribe(number, [text for text, _ in wanted])
        if len(data) > self._largest:
            text = f"the SUBSCRIBE has {len(data)} bytes, and the server takes {self._largest}"
            raise broken(0x95, text)
        self._asked = number, wanted
        self._phase = "subscribing"
        events.append(Greeting(data))

    def _suback(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        number, codes = packets.read_suback(data, at, end)
        asked, wanted = self._asked
        if self._phase != "subscribing" or number != asked:
            raise broken(0x82, "a SUBACK that answers nothing")
        if len(codes) != len(wanted):
            raise broken(0x82, f"a SUBACK for {len(codes)} of {len(wanted)} subscriptions")
        granted = set(self._memory.subscribed)
        for (text, words), code in zip(wanted, codes, strict=True):
            if code < FAILURE:
                granted.add(text)
            else:
                why = f"{words_of(code)} (0x{code:02X})"
                events.append(Unhandled(f"no subscription to {words}: {why}"))
        self._memory.subscribed = frozenset(granted)
        self._open(events)

    def _open(self, events: list[Incoming]) -> None:
        self._phase = "open"
        self._memory.lapsed = False
        self._asked = (0, [])
        events.append(self._ready)

    def _disconnect(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        _, code, options = packets.read_disconnect(data, at, end)
        if code in BLAMES:
            self._blame()
        self._end(code, options, events)

    def _end(self, code: int, options: Any, events: list[Incoming], farewell: bytes = b"") -> None:
        reason = words_of(code) if code else "the server ended the connection"
        for more in (options.get("reason_string"), options.get("server_reference")):
            reason += f": {more[:200]}" if more else ""
        self._phase = "closed"
        events.append(Closing(close_class(code), code, reason, farewell=farewell))

    def _blame(self) -> None:
        """What has ended two links is not sent again: it would end every link that resumes."""
        memory = self._memory
        # The one: what was sent before it has been acknowledged before the server came to it.
        oldest = next(iter(memory.inflight), 0)
        if oldest and oldest == memory.blamed:
            del memory.inflight[oldest]
            oldest = 0
        memory.blamed = oldest

    def _pong(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        if at != end:
            raise malformed("a PINGRESP with a body")
        events.append(PROGRESS)

    # -- what we sent --------------------------------------------------------------------------

    def _puback(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        number, code, options = packets.read_verdict(data, at, end)
        found = self._memory.inflight.pop(number, None)
        if found is None:
            events.append(Unhandled("a PUBACK for a packet that is not in flight"))
            return
        reason = options.get("reason_string", "")[:200] or words_of(code)
        if code >= FAILURE:
            events.append(Refused(found[0], code, reason))
        else:
            events.append(Confirmed(found[0], reason if code else None))
        while self._held:
            later = self._memory.inflight.get(self._held.pop())
            if later is not None:
                events.append(Greeting(_again(later[1])))
                break

    def _pubrec(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        number, code, _ = packets.read_verdict(data, at, end)
        if number in self._memory.inflight:
            raise broken(0x82, "a PUBREC for a message of QoS 1")
        events.append(Unhandled("a PUBREC for a packet that is not in flight"))
        if code < FAILURE:
            events.append(Greeting(packets.answer(packets.PUBREL, number, 0x92)))

    def _pubcomp(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        packets.read_verdict(data, at, end)
        events.append(Unhandled("a PUBCOMP for a packet that is not in flight"))

    def _unsuback(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        packets.read_suback(data, at, end)
        events.append(Unhandled("an UNSUBACK that answers nothing"))

    # -- what others sent ----------------------------------------------------------------------

    def _publish(self, first: int, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        number, publication = packets.read_publish(first, data, at, end)
        if not number:
            events.append(Happening(publication))
            return
        arrived = self._arrived
        if number in arrived:
            raise broken(0x82, "a packet id that is in use")
        qos = first >> 1 & 3
        if number in self._memory.received:
            if qos != 2:
                raise broken(0x82, "a packet id that is in use")
            events.append(Greeting(packets.answer(packets.PUBREC, number)))
            return
        room = self._plan.receive_maximum - len(arrived) - len(self._memory.received)
        full = room <= (-OVERRUN if self._present else 0)
        if full and not (self._present and arrived):
            most = self._plan.receive_maximum
            raise broken(0x93, f"more than {most} unacknowledged messages")
        if full or self._left:
            self._left = True
            return
        arrived[number] = qos
        key = None
        if "message_expiry_interval" not in publication.properties:
            # The server may not give its packet id to another one before we acknowledge it.
            life, content = self._memory.life, (publication.topic, publication.payload)
            key = (life, number, content, publication.id)
        events.append(Happening(publication, number, key, again=publication.duplicate))

    def _pubrel(self, data: bytes, at: int, end: int, events: list[Incoming]) -> None:
        number, _, _ = packets.read_verdict(data, at, end)
        known = number in self._memory.received
        self._memory.received.pop(number, None)
        events.append(Greeting(packets.answer(packets.PUBCOMP, number, 0 if known else 0x92)))

    def __repr__(self) -> str:
        return f"<MqttDialogue {self._phase}, {len(self._memory.inflight)} in flight>"


def _again(data: bytes) -> bytes:
    """A publish, marked as a duplicate."""
    return bytes((data[0] | packets.DUPLICATE,)) + data[1:]


_HANDLERS: Final = {
    packets.CONNACK: MqttDialogue._connack,
    packets.PUBACK: MqttDialogue._puback,
    packets.PUBREC: MqttDialogue._pubrec,
    packets.PUBREL & 0xF0: MqttDialogue._pubrel,
    packets.PUBCOMP: MqttDialogue._pubcomp,
    packets.SUBACK: MqttDialogue._suback,
    packets.UNSUBACK: MqttDialogue._unsuback,
    packets.PINGRESP: MqttDialogue._pong,
    packets.DISCONNECT: MqttDialogue._disconnect,
}
