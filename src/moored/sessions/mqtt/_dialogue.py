"""One MQTT link, from CONNECT to DISCONNECT, without any I/O.

::

    connecting ──CONNACK──▶ subscribing ──SUBACK──▶ open ──▶ closed

`Ready` follows the SUBACK, so that a client that is online misses no message. A resumed MQTT
session is subscribed again as well: the server may have restored it from an older snapshot. The
server sends the messages that it has kept immediately after its CONNACK, so messages may arrive
before `Ready`.

Invariants:

- a packet id is never 0, and never reused while it is in flight;
- the unacknowledged publishes of a link never exceed the server's receive maximum;
- acknowledgements are sent in the order in which the messages arrived, whichever was handled first;
- the packets before an invalid one in the same chunk are handled before the error is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .._content import Text
from .._errors import ProtocolError, QueryFailed, StepFailed
from .._protocol import (
    Answered,
    CloseClass,
    Closing,
    Confirmed,
    Dialogue,
    DialogueEvent,
    Greeting,
    Happening,
    Ignored,
    Outgoing,
    Ready,
    Refused,
    Remember,
    Unhandled,
)
from . import _packets as packets
from ._codec import broken, malformed
from ._filters import unsupported
from ._frames import OVERSIZED, PacketFrames
from ._memory import MqttMemory
from ._packets import Message, MessageTooLarge, SubscriptionRefused
from ._reasons import FAILURE, end_class, refusal_class, words_of

if TYPE_CHECKING:
    from ._mqtt import Mqtt

__all__ = ["MqttDialogue"]

IGNORED: Final = Ignored()
#: The number of messages by which a server may exceed our receive maximum: Mosquitto does not count
#: messages that it sends again, and miscounts by a few under load. Closing the link would make it
#: send all of them again. Messages beyond that are left to the next link, which is made when the
#: others are acknowledged.
OVERRUN: Final = 900
#: The codes of a redirect to another server, which the server may name.
ELSEWHERE: Final = frozenset((0x9C, 0x9D))
#: Added to the QoS of a message that is refused.
REFUSED: Final = 2


@dataclass(slots=True, eq=False, repr=False)
class MqttDialogue(Dialogue):
    """One link of one session."""

    _settings: Mqtt
    _memory: MqttMemory
    # The CONNECT, used once, and not kept: it may hold a password.
    _hello: bytes
    # Whether it requests a clean start.
    _clean: bool
    # The topic of a send is the recipient, joined with these.
    _topic: tuple[str, ...]
    # The topic filters to subscribe to, each with its template.
    _filters: tuple[tuple[str, str], ...]
    _goodbye: bytes
    _frames: PacketFrames = field(init=False)
    _phase: str = "connecting"
    _window: int = field(init=False)
    # The largest packet that the server accepts, and whether it supports retained messages.
    _largest: int = packets.LARGEST
    _retain: bool = True
    # Requests without a SUBACK or UNSUBACK yet, by packet id: the filters, and the query.
    _asked: dict[int, tuple[list[str], str | None]] = field(default_factory=dict)
    _ready: Ready = field(init=False)
    # Whether the server has kept the session.
    _present: bool = False
    # Unacknowledged publishes of the last link that the receive maximum holds back.
    _held: list[int] = field(default_factory=list)
    # Unacknowledged messages in order: packet id -> QoS, negated once handled, and less by REFUSED
    # if the answer is an error.
    _arrived: dict[int, int] = field(default_factory=dict)
    # Whether the server has exceeded OVERRUN.
    _left: bool = False

    def __post_init__(self) -> None:
        self._frames = PacketFrames(self._settings.max_packet_size)
        self._window = self._settings.send_window

    # -- sending -------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the CONNECT."""
        hello, self._hello = self._hello, b""
        return hello

    def write(self, outgoing: Outgoing) -> bytes:
        """Return a PUBLISH with QoS 1; raises `StepFailed` if the server would refuse it."""
        memory = self._memory
        if self._phase != "open":
            raise StepFailed(f"the link is {self._phase}")
        if len(memory.inflight) >= self._window:
            raise StepFailed(f"the server allows no more than {self._window} unconfirmed sends")
        body = outgoing.content if outgoing.body is None else outgoing.body
        topic = outgoing.recipient.join(self._topic)
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
        except Exception as error:  # the properties of a `Message` are not checked otherwise
            raise StepFailed(f"it cannot be sent over MQTT: {error}") from error
        if len(data) > self._largest:
            raise StepFailed(
                f"its packet has {len(data)} bytes, and the server accepts {self._largest}"
            )
        memory.inflight[number] = (outgoing.id, data if self._settings.resumes else b"")
        return data

    def check(self, outgoing: Outgoing) -> None:
        """Raise `StepFailed` for a send that no server accepts; for a dialogue without a link."""
        self._phase = "open"
        self.write(outgoing)

    def _rich(self, address: bytes, number: int, id: str, body: Any) -> bytes:
        """Return a PUBLISH for text or a `Message`."""
        if isinstance(body, Text):
            body = body.text
        if not isinstance(body, Message):
            payload, is_text = packets.as_bytes(body)
            return packets.publish(address, number, id, payload, packets.TEXT_MARK * is_text)
        if body.retain and not self._retain:
            raise ValueError("the server does not support retained messages")
        payload, is_text = packets.as_bytes(body.payload)
        more = packets.more_properties(body, is_text)
        data = packets.publish(address, number, id, payload, more)
        return bytes((data[0] | 1,)) + data[1:] if body.retain else data

    def resend(self, wanted: Container[str]) -> Iterator[tuple[str, bytes | None]]:
        """Return the unacknowledged publishes, marked as duplicates, in order.

        Those beyond the receive maximum come with empty bytes: they are written later, as
        acknowledgements arrive. A broker may end the link because of one send, with or without a
        reason. So if the oldest send is not acknowledged over two links, the next link has one send
        in flight at a time. A send is given up only if it alone was in flight when a link ended,
        twice: of several sends, the cause cannot be known, and the link may just have been cut.
        """
        memory, inflight = self._memory, self._memory.inflight
        alone = len(inflight) == 1
        latest = {id: number for number, (id, _) in inflight.items()}
        for number, (id, _) in list(inflight.items()):
            if id not in wanted or latest[id] != number:
                del inflight[number]
        numbers = list(inflight)
        oldest = inflight[numbers[0]][0] if numbers else ""
        outlived = numbers[:1] == [memory.outlived]
        again = oldest == memory.suspect != "" and not outlived
        strike = not outlived and (alone or (again and memory.probing))
        memory.strikes = (memory.strikes if again else 0) + strike
        if numbers and memory.strikes > 1:
            del inflight[numbers.pop(0)]
            yield oldest, None
            oldest, again, memory.strikes = "", False, 0  # the next one starts without strikes
        memory.suspect, memory.outlived = oldest, 0
        memory.probing = again and len(numbers) > 1
        width = 1 if memory.probing else self._window
        self._held = numbers[width:][::-1]
        for place, number in enumerate(numbers):
            id, data = inflight[number]
            yield id, _again(data) if place < width else b""

    def ping(self) -> bytes:
        """Return a PINGREQ."""
        self._outlived()
        return packets.PINGREQ

    def acknowledge(self, token: Any) -> bytes:
        """Return the PUBACK (or PUBREC) of this message, and of later ones that waited for it."""
        arrived = self._arrived
        qos = arrived.get(token, 0)
        if qos <= 0 or self._phase == "closed":
            return b""
        arrived[token] = -qos
        return self._settled()

    def skip(self, token: Any) -> bytes:
        """Return only the acknowledgements that waited for this message: it is sent again."""
        if self._phase == "closed" or self._arrived.pop(token, None) is None:
            return b""
        return self._settled()

    def _settled(self) -> bytes:
        """Return the acknowledgements of handled messages, up to the first that is not."""
        arrived = self._arrived
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
                "it exceeded the receive maximum: a new link delivers the rest", farewell
            )
        return data

    def _settle(self, number: int) -> bytes:
        qos = -self._arrived.pop(number)
        code = 0x83 if qos > REFUSED else 0
        if qos in (1, 1 + REFUSED):
            return packets.answer(packets.PUBACK, number, code)
        if not code:
            self._memory.received[number] = None
        return packets.answer(packets.PUBREC, number, code)

    def goodbye(self) -> bytes:
        """Return a DISCONNECT."""
        self._outlived()
        return self._goodbye

    def _outlived(self) -> None:
        """Note that the oldest send is not the cause if the link ends from now on."""
        self._memory.outlived = next(iter(self._memory.inflight), 0)

    # -- receiving -----------------------------------------------------------------------------

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        """Yield the events of received bytes, packet by packet."""
        inflight = self._memory.inflight
        if self._phase == "closed":
            return
        try:
            for first, chunk, at, end in self._frames.cut(data):
                if first == packets.PUBACK and end - at == 2 and self._phase == "open":
                    # The fast path for a plain acknowledgement, the most frequent packet.
                    number = chunk[at] << 8 | chunk[at + 1]
                    if number in inflight and not self._held:
                        id, _ = inflight.pop(number)
                        if not inflight:
                            inflight.clear()  # frees its memory
                        yield Confirmed(id)
                        continue
                yield from self._read(first, chunk, at, end)
                if self._phase == "closed":
                    return
        except ProtocolError:
            self._phase = "closed"
            raise

    def _read(self, first: int, data: bytes, at: int, end: int) -> list[DialogueEvent]:
        events: list[DialogueEvent] = []
        kind = first & 0xF0
        if self._phase == "connecting" and kind not in (packets.CONNACK, packets.DISCONNECT):
            raise broken(0x82, "a packet before the CONNACK")
        if first & OVERSIZED:
            self._oversized(first & 0xFF, data, at, end, events)
            return events
        if kind == packets.PUBLISH:
            self._publish(first, data, at, end, events)
            return events
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise broken(0x82, f"a packet of type {first >> 4}, which a server must not send")
        if first != (packets.PUBREL if kind == 0x60 else kind):
            raise malformed(f"a packet of type {first >> 4} with wrong flags")
        handler(self, data, at, end, events)
        return events

    # -- the connection ------------------------------------------------------------------------

    def _connack(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        if self._phase != "connecting":
            raise broken(0x82, "a second CONNACK")
        present, code, options = packets.read_connack(data, at, end)
        if code:
            if code < FAILURE:
                raise broken(0x82, f"a CONNACK with code {code}")
            self._end(refusal_class(code), code, options, events)
            return
        if present and self._clean:
            raise broken(0x82, "a session is present after a clean start")
        if "authentication_method" in options:
            raise broken(0x82, "an authentication method that was not requested")
        if not options.get("maximum_qos", 1):
            self._end(refusal_class(0x9B), 0x9B, options, events, packets.disconnect())
            return
        memory = self._memory
        memory.begun = True
        memory.tried = False
        memory.client_id = options.get("assigned_client_identifier", memory.client_id)
        if not present:
            memory.forget()
            memory.lapsed = True
        self._present = present
        self._window = min(self._settings.send_window, options.get("receive_maximum", 0xFFFF))
        self._largest = options.get("maximum_packet_size", packets.LARGEST)
        self._retain = bool(options.get("retain_available", 1))
        # A shorter interval than the server's is always allowed.
        theirs = options.get("server_keep_alive") or math.inf
        keepalive = float(theirs) if theirs < (self._settings.keepalive or math.inf) else None
        keeps = options.get("session_expiry_interval") != 0
        self._ready = Ready(not memory.lapsed, self._window, keepalive, keeps)
        self._subscribe(options, events)

    def _subscribe(self, options: Any, events: list[DialogueEvent]) -> None:
        """Subscribe to the filters that the server supports, and unsubscribe from stale ones."""
        wanted = []
        for text in self._wanted:
            if code := unsupported(text, options):
                self._refused(text, code, events)
            else:
                wanted.append(text)
        stale = []
        if self._present:
            stale = [text for text in self._memory.subscribed if text not in wanted]
        self._known({*stale, *wanted}, events)
        if stale:
            events.append(Greeting(self._ask(packets.unsubscribe, stale)))
        if not wanted:
            self._open(events)
            return
        self._phase = "subscribing"
        events.append(Greeting(self._ask(packets.subscribe, wanted)))

    @property
    def _wanted(self) -> tuple[str, ...]:
        wanted = self._memory.wanted
        return tuple(text for text, _ in self._filters) if wanted is None else wanted

    def _ask(
        self, write: Callable[[int, list[str]], bytes], filters: list[str], query: str | None = None
    ) -> bytes:
        number = self._memory.take()
        data = write(number, filters)
        if len(data) > self._largest:
            text = f"subscribing needs {len(data)} bytes, and the server accepts {self._largest}"
            raise broken(0x95, text)
        self._asked[number] = filters, query
        return data

    def _known(self, filters: Iterable[str], events: list[DialogueEvent]) -> None:
        """Remember the filters that the server may have; store them for the next process."""
        known = tuple(sorted(filters))
        if known != self._memory.subscribed:
            self._memory.subscribed = known
            if self._settings.outlives:
                events.append(Remember("\n".join(known).encode()))

    def _refused(self, text: str, code: int, events: list[DialogueEvent]) -> None:
        why = words_of(code)
        # Logged by its template: a filter may contain a profile.
        name = dict(self._filters).get(text, "a filter of this session")
        events.append(Unhandled(f"no subscription to {name}: {why} (0x{code:02X})"))
        events.append(Happening(SubscriptionRefused(text, code, why)))

    def query(self, id: str, question: Any) -> bytes:
        """Return a SUBSCRIBE or UNSUBSCRIBE at run time."""
        if self._phase != "open":
            raise QueryFailed(f"the link is {self._phase}")
        write = packets.subscribe if question["do"] == "subscribe" else packets.unsubscribe
        return self._ask(write, [question["topic"]], id)

    def _answered(self, data: bytes, at: int, end: int, name: str) -> tuple[Any, bytes]:
        number, codes = packets.read_suback(data, at, end)
        asked = self._asked.pop(number, None)
        if not self._asked:
            self._asked = {}  # frees the memory of the old one
        if asked is None:
            raise broken(0x82, f"{name} for an unknown packet id")
        if len(codes) != len(asked[0]):
            raise broken(0x82, f"{name} for {len(codes)} of {len(asked[0])} subscriptions")
        return asked, codes

    def _suback(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        (filters, query), codes = self._answered(data, at, end, "a SUBACK")
        if query is None:
            for text, code in zip(filters, codes, strict=True):
                if code >= FAILURE:
                    self._refused(text, code, events)
            self._open(events)
        elif codes[0] < FAILURE:
            wanted = dict.fromkeys((*self._wanted, *filters))
            self._memory.wanted = tuple(wanted)
            self._known({*self._memory.subscribed, *filters}, events)
            events.append(Answered(query))
        else:
            events.append(Answered(query, code=f"{words_of(codes[0])} (0x{codes[0]:02X})"))

    def _unsuback(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        (filters, query), codes = self._answered(data, at, end, "an UNSUBACK")
        gone = {text for text, code in zip(filters, codes, strict=True) if code < FAILURE}
        self._known(set(self._memory.subscribed) - gone, events)
        if query is not None:
            if gone:
                self._memory.wanted = tuple(text for text in self._wanted if text not in gone)
            code = None if gone else f"{words_of(codes[0])} (0x{codes[0]:02X})"
            events.append(Answered(query, code=code))

    def _open(self, events: list[DialogueEvent]) -> None:
        self._phase = "open"
        self._memory.lapsed = False
        events.append(self._ready)

    def _disconnect(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        code, options = packets.read_disconnect(data, at, end)
        self._end(end_class(code), code, options, events)

    def _end(
        self,
        kind: CloseClass,
        code: int,
        options: Any,
        events: list[DialogueEvent],
        farewell: bytes = b"",
    ) -> None:
        reason = words_of(code) if code else "the server ended the connection"
        if code in ELSEWHERE and (where := options.get("server_reference")):
            self._memory.moved, self._memory.tried = where, False
            kind = CloseClass.RESTART
        for more in (options.get("reason_string"), options.get("server_reference")):
            reason += f": {more[:200]}" if more else ""
        self._phase = "closed"
        events.append(Closing(kind, code, reason, farewell=farewell))

    def _pong(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        if at != end:
            raise malformed("a PINGRESP with a body")
        events.append(IGNORED)

    # -- answers to our packets ----------------------------------------------------------------

    def _puback(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        number, code, options = packets.read_result(data, at, end)
        inflight = self._memory.inflight
        found = inflight.pop(number, None)
        if not inflight:
            inflight.clear()
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
                if self._memory.probing:
                    self._memory.suspect, self._memory.strikes = later[0], 0
                events.append(Greeting(_again(later[1])))
                break

    # -- received messages ---------------------------------------------------------------------

    def _publish(
        self, first: int, data: bytes, at: int, end: int, events: list[DialogueEvent]
    ) -> None:
        number, publication = packets.read_publish(first, data, at, end)
        if not number:
            events.append(Happening(publication))
            return
        arrived, qos = self._arrived, first >> 1 & 3
        if self._is_known(number, qos, events):
            return
        room = self._settings.receive_maximum - len(arrived) - len(self._memory.received)
        full = room <= -OVERRUN
        if full and not arrived:
            most = self._settings.receive_maximum
            raise broken(0x93, f"more than {most} unacknowledged messages")
        if full or self._left:
            self._left = True
            return
        arrived[number] = qos
        key = None
        if "message_expiry_interval" not in publication.properties:
            # The server must not reuse the packet id before we acknowledge the message.
            life, content = self._memory.life, (publication.topic, publication.payload)
            key = (life, number, content, publication.id)
        events.append(Happening(publication, number, key, again=publication.duplicate))

    def _is_known(self, number: int, qos: int, events: list[DialogueEvent]) -> bool:
        """Whether it is a message of QoS 2 that was handled before; it is acknowledged again."""
        known = number in self._memory.received
        if number in self._arrived or (known and qos != 2):
            raise broken(0x82, "a packet id that is in use")
        if known:
            events.append(Greeting(packets.answer(packets.PUBREC, number)))
        return known

    def _oversized(
        self, first: int, data: bytes, at: int, end: int, events: list[DialogueEvent]
    ) -> None:
        """Refuse a message that exceeds `max_packet_size`, so that it is not sent again."""
        topic, number, _ = packets.read_address(first, data, at, min(end, len(data)))
        qos = first >> 1 & 3
        if number and self._is_known(number, qos, events):
            return
        if number:
            self._arrived[number] = -qos - REFUSED
            if answers := self._settled():
                events.append(Greeting(answers))
        size = end - at
        events.append(Happening(MessageTooLarge(topic, size, self._settings.max_packet_size)))

    def _pubrel(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        number, _, _ = packets.read_result(data, at, end)
        known = number in self._memory.received
        self._memory.received.pop(number, None)
        events.append(Greeting(packets.answer(packets.PUBCOMP, number, 0 if known else 0x92)))

    def __repr__(self) -> str:
        return f"<MqttDialogue {self._phase}, {len(self._memory.inflight)} in flight>"


def _again(data: bytes) -> bytes:
    """Return a publish with the DUP flag."""
    return bytes((data[0] | packets.DUPLICATE,)) + data[1:]


_HANDLERS: Final = {
    packets.CONNACK: MqttDialogue._connack,
    packets.PUBACK: MqttDialogue._puback,
    packets.PUBREL & 0xF0: MqttDialogue._pubrel,
    packets.SUBACK: MqttDialogue._suback,
    packets.UNSUBACK: MqttDialogue._unsuback,
    packets.PINGRESP: MqttDialogue._pong,
    packets.DISCONNECT: MqttDialogue._disconnect,
}
