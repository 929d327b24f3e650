"""One MQTT link, from CONNECT to DISCONNECT, without any I/O.

::

    connecting ──CONNACK──▶ subscribing ──SUBACK──▶ open ──▶ closed

`Ready` comes after the SUBACK, so that whoever waited for it misses nothing that is sent to it from
then on. A session that the server has kept is subscribed again, too: the server may have restored
it from an older snapshot. What the server kept for us comes right behind its CONNACK, so inbound
messages may come before `Ready`.

What always holds:

- a packet id is never 0 and never given while it is in flight;
- no more is unacknowledged on a link than the server's receive maximum;
- acknowledgements are sent in the order in which the messages came, whoever handled them first;
- a packet before a bad one in the same chunk counts: its events come first, then the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Final

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
from ._frames import OVERSIZED, PacketFrames
from ._memory import MqttMemory
from ._packets import Message, MessageTooLarge, SubscriptionRefused
from ._plan import Plan, lacks
from ._reasons import FAILURE, end_class, refusal_class, words_of

__all__ = ["MqttDialogue"]

IGNORED: Final = Ignored()
#: By so much may a server exceed our receive maximum: Mosquitto does not count what it sends again,
#: and miscounts by a few when it is busy. To close the link for it would only make it send all of
#: them again. What is beyond even that is left to the next link, which we ask for when all before
#: it is acknowledged.
OVERRUN: Final = 900
#: The server wants us to use another one, which it may name.
ELSEWHERE: Final = frozenset((0x9C, 0x9D))
#: Added to the QoS of a message that is answered with an error.
REFUSED: Final = 2


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

    def __init__(self, plan: Plan, memory: MqttMemory) -> None:
        self._plan = plan
        self._memory = memory
        self._frames = PacketFrames(plan.max_packet_size)
        self._phase = "connecting"
        self._window = plan.window
        # The largest packet that the server takes, and whether it keeps retained ones.
        self._largest = packets.LARGEST
        self._retain = True
        # What waits for its SUBACK or UNSUBACK, by packet id: the filters, and the query.
        self._asked: dict[int, tuple[list[str], str | None]] = {}
        self._ready = Ready()
        # Whether the server knew the session.
        self._present = False
        # Unacknowledged publishes of the last link that the receive maximum keeps back.
        self._held: list[int] = []
        # What came and is not acknowledged yet, in order: packet id -> QoS, negative once handled,
        # and less by REFUSED if the answer is an error.
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
        # Once for each link, and not kept while it lives: a password may be in it.
        hello, self._plan.hello = self._plan.hello, b""
        return hello

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

    def resend(self, wanted: Container[str]) -> Iterator[tuple[str, bytes | None]]:
        """The unacknowledged publishes, marked as duplicates, in order.

        Those beyond the receive maximum come with no bytes: they are written by and by, as
        acknowledgements make room. Brokers may end a link for one send, with or without a word.
        So if the oldest is not acknowledged over two links, only one at a time is in flight on the
        next. Given up is only one that was alone in flight when a link ended, two times: of many
        that were in flight nobody can tell which it was, or whether the link was just cut.
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
            oldest, again, memory.strikes = "", False, 0  # each of the others begins anew
        memory.suspect, memory.outlived = oldest, 0
        memory.probing = again and len(numbers) > 1
        width = 1 if memory.probing else self._window
        self._held = numbers[width:][::-1]
        for place, number in enumerate(numbers):
            id, data = inflight[number]
            yield id, _again(data) if place < width else b""

    def ping(self) -> bytes:
        """PINGREQ."""
        self._outlived()
        return packets.PINGREQ

    def acknowledge(self, token: Any) -> bytes:
        """PUBACK (or PUBREC), for this and for all that waited for it to be handled."""
        arrived = self._arrived
        qos = arrived.get(token, 0)
        if qos <= 0 or self._phase == "closed":
            return b""
        arrived[token] = -qos
        return self._settled()

    def skip(self, token: Any) -> bytes:
        """Nothing for this one, which the broker sends again, and what waited for it."""
        if self._phase == "closed" or self._arrived.pop(token, None) is None:
            return b""
        return self._settled()

    def _settled(self) -> bytes:
        """The acknowledgements of all that is handled, up to the first that is not."""
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
                "more came than there was room for: a new link brings the rest", farewell
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
        """DISCONNECT."""
        self._outlived()
        return self._plan.goodbye

    def _outlived(self) -> None:
        """Whatever ends the link from now on, it is not the oldest send."""
        self._memory.outlived = next(iter(self._memory.inflight), 0)

    # -- what we hear --------------------------------------------------------------------------

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
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
                        id, _ = inflight.pop(number)
                        if not inflight:
                            inflight.clear()  # gives back the room that it took
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
            raise broken(0x82, "the server speaks before its CONNACK")
        if first & OVERSIZED:
            self._oversized(first & 0xFF, data, at, end, events)
            return events
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

    def _connack(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        if self._phase != "connecting":
            raise broken(0x82, "a second CONNACK")
        present, code, options = packets.read_connack(data, at, end)
        if code:
            if code < FAILURE:
                raise broken(0x82, f"a CONNACK with code {code}")
            self._end(refusal_class(code), code, options, events)
            return
        if present and self._plan.clean:
            raise broken(0x82, "a session is present after a clean start")
        if "authentication_method" in options:
            raise broken(0x82, "an authentication that nobody asked for")
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
        self._window = min(self._plan.window, options.get("receive_maximum", 0xFFFF))
        self._largest = options.get("maximum_packet_size", packets.LARGEST)
        self._retain = bool(options.get("retain_available", 1))
        # To ask more often than the server wants is always allowed.
        told = options.get("server_keep_alive") or math.inf
        keepalive = float(told) if told < (self._plan.keepalive or math.inf) else None
        keeps = options.get("session_expiry_interval") != 0
        self._ready = Ready(not memory.lapsed, self._window, keepalive, keeps)
        self._subscribe(options, events)

    def _subscribe(self, options: Any, events: list[DialogueEvent]) -> None:
        """Ask for all that is wanted and that the server can have, and for nothing else."""
        wanted = []
        for text in self._wanted:
            if code := lacks(text, options):
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
        return tuple(text for text, _ in self._plan.filters) if wanted is None else wanted

    def _ask(
        self, write: Callable[[int, list[str]], bytes], filters: list[str], query: str | None = None
    ) -> bytes:
        number = self._memory.take()
        data = write(number, filters)
        if len(data) > self._largest:
            text = f"subscribing takes {len(data)} bytes, and the server takes {self._largest}"
            raise broken(0x95, text)
        self._asked[number] = filters, query
        return data

    def _known(self, filters: Iterable[str], events: list[DialogueEvent]) -> None:
        """Remember what the server may have, as far as it outlives this process."""
        known = tuple(sorted(filters))
        if known != self._memory.subscribed:
            self._memory.subscribed = known
            if self._plan.outlives:
                events.append(Remember("\n".join(known).encode()))

    def _refused(self, text: str, code: int, events: list[DialogueEvent]) -> None:
        why = words_of(code)
        # Counted and logged by its template: a filter may have somebody's name in it.
        name = dict(self._plan.filters).get(text, "a filter of this session")
        events.append(Unhandled(f"no subscription to {name}: {why} (0x{code:02X})"))
        events.append(Happening(SubscriptionRefused(text, code, why)))

    def query(self, id: str, question: Any) -> bytes:
        """SUBSCRIBE or UNSUBSCRIBE, at run time."""
        if self._phase != "open":
            raise QueryFailed(f"the link is {self._phase}")
        write = packets.subscribe if question["do"] == "subscribe" else packets.unsubscribe
        return self._ask(write, [question["topic"]], id)

    def _answered(self, data: bytes, at: int, end: int, name: str) -> tuple[Any, bytes]:
        number, codes = packets.read_suback(data, at, end)
        asked = self._asked.pop(number, None)
        if not self._asked:
            self._asked = {}  # one that had something in it takes more room
        if asked is None:
            raise broken(0x82, f"{name} that answers nothing")
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
        _, code, options = packets.read_disconnect(data, at, end)
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

    # -- what we sent --------------------------------------------------------------------------

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

    def _pubrec(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        number, code, _ = packets.read_result(data, at, end)
        if number in self._memory.inflight:
            raise broken(0x82, "a PUBREC for a message of QoS 1")
        events.append(Unhandled("a PUBREC for a packet that is not in flight"))
        if code < FAILURE:
            events.append(Greeting(packets.answer(packets.PUBREL, number, 0x92)))

    def _pubcomp(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        packets.read_result(data, at, end)
        events.append(Unhandled("a PUBCOMP for a packet that is not in flight"))

    # -- what others sent ----------------------------------------------------------------------

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
        room = self._plan.receive_maximum - len(arrived) - len(self._memory.received)
        full = room <= -OVERRUN
        if full and not arrived:
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

    def _is_known(self, number: int, qos: int, events: list[DialogueEvent]) -> bool:
        """Whether it is a message of QoS 2 that was handled before, and is answered again."""
        known = number in self._memory.received
        if number in self._arrived or (known and qos != 2):
            raise broken(0x82, "a packet id that is in use")
        if known:
            events.append(Greeting(packets.answer(packets.PUBREC, number)))
        return known

    def _oversized(
        self, first: int, data: bytes, at: int, end: int, events: list[DialogueEvent]
    ) -> None:
        """A message that the server should have dropped: refuse it, so that it comes no more."""
        topic, number, _ = packets.read_address(first, data, at, min(end, len(data)))
        qos = first >> 1 & 3
        if number and self._is_known(number, qos, events):
            return
        if number:
            self._arrived[number] = -qos - REFUSED
            if answers := self._settled():
                events.append(Greeting(answers))
        size = end - at
        events.append(Happening(MessageTooLarge(topic, size, self._plan.max_packet_size)))

    def _pubrel(self, data: bytes, at: int, end: int, events: list[DialogueEvent]) -> None:
        number, _, _ = packets.read_result(data, at, end)
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
