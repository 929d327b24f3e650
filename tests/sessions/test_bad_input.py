"""Malformed or excessive input from a server ends that one link and affects nothing else."""

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
from tests.sessions.misbehaving_server import LinkScript, MisbehavingServer
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

FUZZ = settings(
    max_examples=scaled(300, least=12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: The limit of queued events with acknowledgement, and of those without.
EVENTS = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log of the sessions: each bad packet logs a warning."""
    with silent("moored.sessions"):
        yield


@dataclass
class Victim:
    """A session whose server misbehaves, and another session beside it."""

    sessions: Sessions
    bad_server: MisbehavingServer
    session: Session
    other: Session

    async def play(self, scripts: Iterable[LinkScript]) -> None:
        """Play these scripts one after the other, and check the state of the session."""
        self.bad_server.scripts.extend(scripts)
        await self.session.disconnect()
        sending = asyncio.create_task(self._send_during_the_scripts())
        async with asyncio.timeout(LIMIT):
            while (
                self.bad_server.scripts
                or self.bad_server.scripted_links
                or self.session.state != "online"
            ):
                await self._reconnect()
            # The server behaves again: the session must work as before.
            while not isinstance(await self._send(), Acked):
                await self._reconnect()
        assert isinstance(await sending, Acked | NotSent | Unknown | Rejected)
        self._check()

    async def _send_during_the_scripts(self) -> Any:
        return await self.session.send("bob", b"x", outcome=True, hold=True, timeout=LIMIT)

    async def _send(self) -> Any:
        return await self.session.send("bob", b"after", outcome=True, hold=True, timeout=1.0)

    async def _reconnect(self) -> None:
        """Connect again: a script may have stopped the session, or set a long retry delay."""
        status = self.session.status()
        if status["state"] == "connecting/waiting" and status["for"] > 0.2:
            await self.session.disconnect()
        if status["state"].startswith("offline"):
            with contextlib.suppress(NotConnected):
                await self.session.connect(1.0)
        await asyncio.sleep(0.001)

    def _check(self) -> None:
        status = self.session.status()
        assert status["crashes"] == 0
        assert status["sender_crashes"] == 0
        assert status["sending"] == status["waiting"] == 0
        assert status["events_waiting"] <= 2 * EVENTS
        assert self.sessions.whereis("victim") is self.session
        assert (self.other.state, self.other.generation) == ("online", 1)


@contextlib.asynccontextmanager
async def victim_of(port: int, protocol: Callable[[int], Protocol]) -> AsyncIterator[Victim]:
    """Put a misbehaving server in front of the real server of that port."""
    async with (
        MisbehavingServer(port) as bad_server,
        Sessions(backoff=Backoff(0.001, 0.01), connect_rate=1000, events=EVENTS) as sessions,
    ):
        other = await sessions.connect("other", protocol(port))
        victim = await sessions.connect("victim", protocol(bad_server.port))
        yield Victim(sessions, bad_server, victim, other)
        assert isinstance(await other.send("bob", b""), Acked)


def mqtt(port: int) -> Mqtt:
    # Without subscriptions, a link is ready after its CONNACK.
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
    play: Callable[[list[LinkScript]], None],
    pieces: st.SearchStrategy[bytes],
    first: list[LinkScript],
) -> None:
    """Play the known scripts, then generated ones."""
    play(first)
    scripts = st.builds(
        LinkScript,
        pieces=st.lists(pieces, min_size=1, max_size=6).map(tuple),
        relay_first=st.sampled_from([0, 0, 1, 7, 20, 1000]),
        reset=st.booleans(),
    )
    FUZZ(given(st.lists(scripts, min_size=1, max_size=4))(play))()


def damaged(packets: list[bytes]) -> st.SearchStrategy[bytes]:
    """Generate truncated packets with one byte changed."""

    def damage(packet: bytes, position: int, value: int, end: int) -> bytes:
        changed = bytearray(packet)
        changed[position % len(packet)] = value
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
KNOWN_MQTT_SCRIPTS = [
    LinkScript((b"HTTP/1.1 400 Bad Request\r\n\r\n",)),
    LinkScript((b"\x30\xff\xff\xff\x7f" + bytes(9000),)),  # claims to be a packet of 256 MiB
    LinkScript((CONNACK, b"\x30\xff\xff\xff\xff\xff")),
    LinkScript((CONNACK, b"\x30\x05\x00\x03\xff\xfe\xfd")),  # a topic that is not UTF-8
    LinkScript((CONNACK[:3],)),
    LinkScript((CONNACK, CONNACK)),
    LinkScript((SUBACK, CONNACK)),
    LinkScript((publish(1), CONNACK, SUBACK)),
    LinkScript(
        (CONNACK, *(publish(number) for number in range(1, 9)))
    ),  # more than receive_maximum
    LinkScript((CONNACK, publish(1), publish(1))),
    LinkScript((b"\x00" * 100,), relay_first=1000),
    LinkScript((b"",), reset=True),
]


@pytest.mark.parametrize("protocol", [mqtt, subscribing])
def test_malformed_mqtt_ends_one_link_and_the_session_recovers(
    broker: Mosquitto, protocol: Callable[[int], Mqtt]
) -> None:
    noise = st.binary(max_size=64)
    with asyncio.Runner() as runner:
        context = victim_of(broker.port, protocol)
        here = runner.run(context.__aenter__())
        fuzz(
            lambda scripts: runner.run(here.play(scripts)),
            st.one_of(st.sampled_from(PACKETS), damaged(PACKETS), noise),
            KNOWN_MQTT_SCRIPTS,
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
KNOWN_DEMO_SCRIPTS = [
    LinkScript((b"\xff\xff\xff\xff" + bytes(1000),)),
    LinkScript((b"\x00\x04\x00\x01",)),
    LinkScript((framed(b'{"k":"welcome\xff\xfe"}'),)),
    LinkScript((framed(b'{"k":"welcome","token":"\xed\xa0\x80"}'),)),
    LinkScript((framed(b'{"k":"wel'),)),
    LinkScript((WELCOME, WELCOME)),
    LinkScript((FRAMES[4], WELCOME)),
    LinkScript((WELCOME, framed(b"[" * 100_000))),
    *(
        LinkScript((WELCOME, framed(DEEP + b'"options":[' + b"[" * depth + b"]" * depth + b"]}}")))
        for depth in (900, 950, 960, 970, 980, 990)
    ),
    *(
        LinkScript((WELCOME, framed(b'{"k":"close","code":' + b"[" * depth + b"]" * depth + b"}")))
        for depth in (900, 950, 970, 990)
    ),
    LinkScript((WELCOME, frame(k="close", code="x" * 200_000))),
    LinkScript((WELCOME, framed(b'{"k":"message","id":"1","from":"x","n":1e999,"content":1}'))),
    LinkScript((WELCOME, frame(k="message", id="1", n=10**400, content=1, **{"from": "x"}))),
    LinkScript((b"\x00\x00\x00",), relay_first=1000),
    LinkScript((b"",), reset=True),
]


def test_malformed_demo_frames_end_one_link_and_the_session_recovers() -> None:
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
        context = victim_of(tcp.port, demo)
        here = runner.run(context.__aenter__())
        fuzz(
            lambda scripts: runner.run(here.play(scripts)),
            st.one_of(st.sampled_from(FRAMES), invented, damaged(FRAMES), noise),
            KNOWN_DEMO_SCRIPTS,
        )
        runner.run(context.__aexit__(None, None, None))
        runner.run(server.close())


async def test_close_reason_of_any_length_is_shortened() -> None:
    async with DemoServer() as server:
        tcp = await server.serve()
        async with victim_of(tcp.port, demo) as here:
            reasons: list[str] = []
            here.session.attach(lambda event: reasons.append(event.data.reason))
            long = {"class": "transient", "code": "x" * 200_000}
            await here.play([LinkScript((WELCOME, frame(k="close", **long)))])
            assert any("xxx" in reason for reason in reasons)
            assert max(map(len, reasons)) < 1000


# -- floods ------------------------------------------------------------

#: The most memory that a flood may take, in bytes.
MAX_MEMORY = 4 * 1024 * 1024


def endless(start: bytes, piece: bytes, many: int) -> Callable[[], Iterable[bytes]]:
    """Return a function that yields `start`, and then `piece` many times."""
    # Several times MAX_MEMORY, unless the pieces are small: those take more memory than bytes.
    size = min(many * len(piece), scaled(32, least=8) * 1024 * 1024)

    def flood() -> Iterator[bytes]:
        yield start
        chunk = piece * max(1, 65536 // len(piece))
        for _ in range(size // len(chunk)):
            yield chunk

    return flood


MQTT_FLOODS = {
    "messages without a consumer": publish(0, qos=0, payload=bytes(1000)),
    "PUBRELs, which need an answer": mqtt5.PubRelPacket(9).write(),
    "PINGRESPs": mqtt5.PingRespPacket().write(),
    "PUBACKs with an unknown id": puback(77),
}
DEMO_FLOODS = {
    "messages without a consumer": FRAMES[8],
    "pings, which need an answer": frame(k="ping"),
    "credentials": frame(k="paired", key="AAAA"),
    "frames of an unknown kind": frame(k="?", more=[1] * 10),
    "responses with an unknown id": frame(k="answer", id="77", value=1),
}


def one_of(floods: Iterable[str]) -> list[Any]:
    """The names of all floods, the others in `make soak`."""
    one, *more = floods
    return [one, *(pytest.param(each, marks=pytest.mark.soak) for each in more)]


class SmallBufferTcp(Tcp):
    """A TCP endpoint with a small send buffer in the kernel."""

    async def dial(self, receiver: Receiver) -> Transport:
        """Connect."""
        transport: Any = await super().dial(receiver)
        sock = transport._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return transport  # type: ignore[no-any-return]


def small_buffer_mqtt(port: int) -> Mqtt:
    protocol = mqtt(port)
    protocol._endpoint = SmallBufferTcp("127.0.0.1", port)
    return protocol


def small_buffer_demo(port: int) -> Demo:
    return Demo(SmallBufferTcp("127.0.0.1", port), resume=True)


@pytest.mark.parametrize("what", one_of(MQTT_FLOODS))
async def test_flood_over_mqtt_takes_bounded_memory(what: str, broker: Mosquitto) -> None:
    flood = endless(CONNACK, MQTT_FLOODS[what], scaled(250_000, least=80_000))
    await _check_flood(broker.port, small_buffer_mqtt, flood, needs_answers="answer" in what)


@pytest.mark.parametrize("what", one_of(DEMO_FLOODS))
async def test_flood_over_the_demo_protocol_takes_bounded_memory(what: str) -> None:
    async with DemoServer() as server:
        tcp = await server.serve()
        answer = "answer" in what
        many = scaled(80_000, least=25_000 if answer else 8_000)
        flood = endless(WELCOME, DEMO_FLOODS[what], many)
        await _check_flood(tcp.port, small_buffer_demo, flood, needs_answers=answer)


async def _check_flood(
    port: int,
    protocol: Callable[[int], Protocol],
    flood: Callable[[], Iterable[bytes]],
    *,
    needs_answers: bool,
) -> None:
    async with victim_of(port, protocol) as here:
        await here.session.disconnect()
        here.bad_server.flood = flood
        tracemalloc.start()
        try:
            before = here.session.generation
            # (The result does not matter: the test waits for the end of the link.)
            connecting = asyncio.create_task(here.session.connect(LIMIT))
            await until(lambda: here.session.generation > before + 1, 3 * LIMIT)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await asyncio.gather(connecting, return_exceptions=True)
        assert ("reads no replies" in here.session.status()["reason"]) == needs_answers
        assert peak < MAX_MEMORY, (
            f"{peak} bytes of memory were taken by a flood of {here.bad_server.flooded}"
        )
        # The other session is not affected, and this one recovers when its server behaves.
        assert isinstance(await here.other.send("bob", b""), Acked)
        here.bad_server.flood = None
        await here.play([LinkScript((b"",))])
