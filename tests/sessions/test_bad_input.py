"""A server that speaks nonsense: it loses that one link, and nothing else happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mqtt5
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.logs import silent
from tests.servers import require_server
from tests.sessions.liar import Liar, Lie
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.mqtt.peers import CONNACK, SUBACK, connack, puback, publish
from tests.sessions.support import LIMIT, until

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    NotConnected,
    NotSent,
    Protocol,
    Rejected,
    Session,
    Sessions,
    Tcp,
    Unknown,
)
from moored.sessions.mqtt import Mqtt
from moored.sessions.transport._transport import Receiver, Transport
from moored.testing import scaled
from moored.testing.demo import Demo, DemoServer

OFTEN = settings(
    max_examples=scaled(300, least=12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: What may wait for somebody to take it: so many that are acknowledged, and so many others.
EVENTS = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No log of the sessions: a warning for each piece of nonsense is many."""
    with silent("moored.sessions"):
        yield


@dataclass
class Place:
    """Two sessions: one whose server lies, and another beside it."""

    sessions: Sessions
    liar: Liar
    victim: Session
    other: Session

    async def play(self, lies: Iterable[Lie]) -> None:
        """Tell these lies, one after the other, and look what is left of the victim."""
        self.liar.lies.extend(lies)
        await self.victim.disconnect()
        sending = asyncio.create_task(self._send_while_it_lasts())
        async with asyncio.timeout(LIMIT):
            while self.liar.lies or self.liar.lying or self.victim.state != "online":
                await self._go_on()
            # The server is honest again, and so the session is as good as new.
            while not isinstance(await self._send(), Acked):
                await self._go_on()
        assert isinstance(await sending, Acked | NotSent | Unknown | Rejected)
        self._check()

    async def _send_while_it_lasts(self) -> Any:
        return await self.victim.send("bob", b"x", outcome=True, hold=True, timeout=LIMIT)

    async def _send(self) -> Any:
        return await self.victim.send("bob", b"after", outcome=True, hold=True, timeout=1.0)

    async def _go_on(self) -> None:
        """What was said may have been reason enough to stop, or to come back tomorrow."""
        status = self.victim.status()
        if status["state"] == "connecting/waiting" and status["for"] > 0.2:
            await self.victim.disconnect()
        if status["state"].startswith("offline"):
            with contextlib.suppress(NotConnected):
                await self.victim.connect(1.0)
        await asyncio.sleep(0.001)

    def _check(self) -> None:
        status = self.victim.status()
        assert status["crashes"] == 0
        assert status["sender_crashes"] == 0
        assert status["sending"] == status["waiting"] == 0
        assert status["events_waiting"] <= 2 * EVENTS
        assert self.sessions.whereis("victim") is self.victim
        assert (self.other.state, self.other.generation) == ("online", 1)


@contextlib.asynccontextmanager
async def place(port: int, protocol: Callable[[int], Protocol]) -> AsyncIterator[Place]:
    """A liar before the honest server of that port."""
    async with (
        Liar(port) as liar,
        Sessions(backoff=Backoff(0.001, 0.01), connect_rate=1000, events=EVENTS) as sessions,
    ):
        other = await sessions.connect("other", protocol(port))
        victim = await sessions.connect("victim", protocol(liar.port))
        yield Place(sessions, liar, victim, other)
        assert isinstance(await other.send("bob", b""), Acked)


def mqtt(port: int) -> Mqtt:
    # Without subscriptions, a link is open with its CONNACK.
    uri = f"mqtt://127.0.0.1:{port}"
    return Mqtt(uri, subscribe=(), max_packet_size=4096, receive_maximum=4)


def subscribing(port: int) -> Mqtt:
    return Mqtt(f"mqtt://127.0.0.1:{port}", max_packet_size=4096, receive_maximum=4)


def demo(port: int) -> Demo:
    return Demo(Tcp("127.0.0.1", port), resume=True)


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    with Mosquitto(require_server("mosquitto")) as server:
        yield server


def fuzz(
    play: Callable[[list[Lie]], None], pieces: st.SearchStrategy[bytes], first: list[Lie]
) -> None:
    """Play a list of known lies, then many that nobody has thought of."""
    play(first)
    lies = st.builds(
        Lie,
        pieces=st.lists(pieces, min_size=1, max_size=6).map(tuple),
        honest=st.sampled_from([0, 0, 1, 7, 20, 1000]),
        reset=st.booleans(),
    )
    OFTEN(given(st.lists(lies, min_size=1, max_size=4))(play))()


def damaged(packets: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of these, with a byte changed, cut off, or both."""

    def damage(packet: bytes, place: int, value: int, end: int) -> bytes:
        changed = bytearray(packet)
        changed[place % len(packet)] = value
        return bytes(changed[: 1 + end % len(packet)])

    byte = st.integers(0, 255)
    return st.builds(damage, st.sampled_from(packets), st.integers(0, 999), byte, byte)


# -- MQTT ----------------------------------------------------------------------------------------

PACKETS = [
    CONNACK,
    connack(receive_max=1, max_packet_size=60),
    connack(session_present=True, receive_max=1, server_keep_alive=1, reason_str="ä"),
    connack(reason_code=mqtt5.ConnAckReasonCode.BAD_USER_NAME_OR_PASSWORD),
    connack(reason_code=mqtt5.ConnAckReasonCode.SERVER_BUSY),
    SUBACK,
    *(publish(number) for number in range(1, 6)),
    publish(7, qos=2),
    publish(0, qos=0, payload=bytes(3000)),
    *(puback(number) for number in (1, 2, 3, 65535)),
    mqtt5.PubAckPacket(2, reason_code=mqtt5.PubAckReasonCode.QUOTA_EXCEEDED).write(),
    mqtt5.PubRelPacket(7).write(),
    mqtt5.PubRecPacket(1).write(),
    mqtt5.PubCompPacket(1).write(),
    mqtt5.UnsubAckPacket(1, [mqtt5.UnsubAckReasonCode.SUCCESS]).write(),
    mqtt5.PingRespPacket().write(),
    mqtt5.DisconnectPacket(reason_str="bye").write(),
    mqtt5.AuthPacket().write(),
    mqtt5.ConnectPacket("x").write(),
]
KNOWN_OF_MQTT = [
    Lie((b"HTTP/1.1 400 Bad Request\r\n\r\n",)),
    Lie((b"\x30\xff\xff\xff\x7f" + bytes(9000),)),  # a packet of 256 MiB, it says
    Lie((CONNACK, b"\x30\xff\xff\xff\xff\xff")),
    Lie((CONNACK, b"\x30\x05\x00\x03\xff\xfe\xfd")),  # a topic that is not UTF-8
    Lie((CONNACK[:3],)),
    Lie((CONNACK, CONNACK)),
    Lie((SUBACK, CONNACK)),
    Lie((publish(1), CONNACK, SUBACK)),
    Lie((CONNACK, *(publish(number) for number in range(1, 9)))),  # too many at once
    Lie((CONNACK, publish(1), publish(1))),
    Lie((b"\x00" * 100,), honest=1000),
    Lie((b"",), reset=True),
]


@pytest.mark.parametrize("protocol", [mqtt, subscribing])
def test_nonsense_over_mqtt(broker: Mosquitto, protocol: Callable[[int], Mqtt]) -> None:
    noise = st.binary(max_size=64)
    with asyncio.Runner() as runner:
        context = place(broker.port, protocol)
        here = runner.run(context.__aenter__())
        fuzz(
            lambda lies: runner.run(here.play(lies)),
            st.one_of(st.sampled_from(PACKETS), damaged(PACKETS), noise),
            KNOWN_OF_MQTT,
        )
        runner.run(context.__aexit__(None, None, None))


# -- the demo protocol ---------------------------------------------------------------------------


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def frame(**fields: Any) -> bytes:
    return framed(json.dumps(fields).encode())


WELCOME = frame(k="welcome", resumed=False, token="t", window=2)
FRAMES = [
    WELCOME,
    frame(k="welcome", resumed=True, token="t", window=None),
    frame(k="pair", code="1234"),
    frame(k="paired", key="AAAA"),
    frame(k="ack", id="x"),
    frame(k="nack", id="x", code={"a": [1]}, reason="no"),
    frame(k="upto", more=1),
    frame(k="answer", id="1", value=None),
    frame(k="message", id="1", n=1, content={"type": "text", "text": "hi"}, **{"from": "eve"}),
    frame(k="message", id="2", n=2, content=None, **{"from": "eve"}),
    frame(k="receipt", ids=[1, None], kind=3, by=[]),
    frame(k="presence", who=[], state={}),
    frame(k="group", anything=[[]]),
    frame(k="ping"),
    frame(k="pong"),
    frame(k="close", **{"class": "transient", "reason": "x", "retry_after": 3600}),
    frame(k="close", **{"class": "restart"}),
    frame(k="close", **{"class": "takeover", "code": [["x"]]}),
    frame(k="error", reason="no"),
]
KINDS = sorted({json.loads(each[4:])["k"] for each in FRAMES} | {"send", "hello", "", "?"})
FIELDS = ["id", "n", "from", "to", "content", "code", "reason", "token", "window", "key"]
FIELDS += ["more", "ids", "kind", "class", "extra"]
DEEP = b'{"k":"message","id":"1","from":"x","n":1,"content":{"type":"poll","question":"?",'
KNOWN_OF_DEMO = [
    Lie((b"\xff\xff\xff\xff" + bytes(1000),)),
    Lie((b"\x00\x04\x00\x01",)),
    Lie((framed(b'{"k":"welcome\xff\xfe"}'),)),
    Lie((framed(b'{"k":"welcome","token":"\xed\xa0\x80"}'),)),
    Lie((framed(b'{"k":"wel'),)),
    Lie((WELCOME, WELCOME)),
    Lie((FRAMES[4], WELCOME)),
    Lie((WELCOME, framed(b"[" * 100_000))),
    *(
        Lie((WELCOME, framed(DEEP + b'"options":[' + b"[" * depth + b"]" * depth + b"]}}")))
        for depth in (900, 950, 960, 970, 980, 990)
    ),
    *(
        Lie((WELCOME, framed(b'{"k":"close","code":' + b"[" * depth + b"]" * depth + b"}")))
        for depth in (900, 950, 970, 990)
    ),
    Lie((WELCOME, frame(k="close", code="x" * 200_000))),
    Lie((WELCOME, framed(b'{"k":"message","id":"1","from":"x","n":1e999,"content":1}'))),
    Lie((WELCOME, frame(k="message", id="1", n=10**400, content=1, **{"from": "x"}))),
    Lie((b"\x00\x00\x00",), honest=1000),
    Lie((b"",), reset=True),
]


def test_nonsense_over_the_demo_protocol() -> None:
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*FIELDS, "type", "text", "options"]), inner, max_size=3
            )
        ),
        max_leaves=6,
    )
    invented = st.builds(
        lambda kind, fields: frame(k=kind, **{k: v for k, v in fields.items() if k != "k"}),
        st.sampled_from(KINDS),
        st.dictionaries(st.sampled_from(FIELDS), values, max_size=5),
    )
    noise = st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(framed))
    with asyncio.Runner() as runner:
        server = DemoServer()
        tcp = runner.run(server.serve())
        context = place(tcp.port, demo)
        here = runner.run(context.__aenter__())
        fuzz(
            lambda lies: runner.run(here.play(lies)),
            st.one_of(st.sampled_from(FRAMES), invented, damaged(FRAMES), noise),
            KNOWN_OF_DEMO,
        )
        runner.run(context.__aexit__(None, None, None))
        runner.run(server.close())


async def test_a_reason_of_any_length_is_told_in_few_words() -> None:
    async with DemoServer() as server:
        tcp = await server.serve()
        async with place(tcp.port, demo) as here:
            reasons: list[str] = []
            here.victim.attach(lambda event: reasons.append(event.data.reason))
            long = {"class": "transient", "code": "x" * 200_000}
            await here.play([Lie((WELCOME, frame(k="close", **long)))])
            assert any("xxx" in reason for reason in reasons)
            assert max(map(len, reasons)) < 1000


# -- too much ------------------------------------------------------------------------------------

#: What may be kept of all that a server says, at most, in bytes.
MOST = 4 * 1024 * 1024


def endless(start: bytes, piece: bytes, many: int) -> Callable[[], Iterable[bytes]]:
    """Something to begin with, then the same again and again."""
    # Of what is large, much more than may be kept; what is small would take more room than it has.
    size = min(many * len(piece), scaled(32, least=8) * 1024 * 1024)

    def flood() -> Iterator[bytes]:
        yield start
        chunk = piece * max(1, 65536 // len(piece))
        for _ in range(size // len(chunk)):
            yield chunk

    return flood


MQTT_FLOODS = {
    "messages that nobody takes": publish(0, qos=0, payload=bytes(1000)),
    "releases that want an answer": mqtt5.PubRelPacket(9).write(),
    "signs of life": mqtt5.PingRespPacket().write(),
    "acknowledgements of nothing": puback(77),
}
DEMO_FLOODS = {
    "messages that nobody takes": FRAMES[8],
    "questions for a sign of life": frame(k="ping"),
    "credentials": frame(k="paired", key="AAAA"),
    "frames that nobody knows": frame(k="?", more=[1] * 10),
    "answers to nothing": frame(k="answer", id="77", value=1),
}


class Narrow(Tcp):
    """A TCP endpoint with little room for what the server does not take."""

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect."""
        transport: Any = await super().dial(receiver)
        sock = transport._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return transport  # type: ignore[no-any-return]


def narrow_mqtt(port: int) -> Mqtt:
    protocol = mqtt(port)
    protocol._endpoint = Narrow("127.0.0.1", port)
    return protocol


def narrow_demo(port: int) -> Demo:
    return Demo(Narrow("127.0.0.1", port), resume=True)


@pytest.mark.parametrize("what", MQTT_FLOODS)
async def test_a_flood_over_mqtt(what: str, broker: Mosquitto) -> None:
    flood = endless(CONNACK, MQTT_FLOODS[what], scaled(250_000, least=80_000))
    await _flooded(broker.port, narrow_mqtt, flood, wants_answers="answer" in what)


@pytest.mark.parametrize("what", DEMO_FLOODS)
async def test_a_flood_over_the_demo_protocol(what: str) -> None:
    async with DemoServer() as server:
        tcp = await server.serve()
        flood = endless(WELCOME, DEMO_FLOODS[what], scaled(80_000, least=25_000))
        await _flooded(tcp.port, narrow_demo, flood, wants_answers="sign" in what)


async def _flooded(
    port: int,
    protocol: Callable[[int], Protocol],
    flood: Callable[[], Iterable[bytes]],
    *,
    wants_answers: bool,
) -> None:
    async with place(port, protocol) as here:
        await here.victim.disconnect()
        here.liar.flood = flood
        tracemalloc.start()
        try:
            before = here.victim.generation
            # (A link that is open by then is as good: its end is what is waited for.)
            connecting = asyncio.create_task(here.victim.connect(LIMIT))
            await until(lambda: here.victim.generation > before + 1, 3 * LIMIT)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await asyncio.gather(connecting, return_exceptions=True)
        assert ("takes no answers" in here.victim.status()["reason"]) == wants_answers
        assert peak < MOST, f"{peak} bytes were kept of a flood of {here.liar.flooded}"
        # Beside it, nobody has noticed; and when the server is sane again, so is the session.
        assert isinstance(await here.other.send("bob", b""), Acked)
        here.liar.flood = None
        await here.play([Lie((b"",))])
