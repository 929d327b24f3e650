"""A link that is cut, and a broker that is killed: every send has one outcome, and it is true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiomqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.storm import Faults, Storm
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Session, Sessions
from moored.sessions.mqtt import Mqtt
from moored.testing import FaultProxy, base_seed, scaled

log = logging.getLogger(__name__)

SENDS = scaled(1000, least=200)
CUTS = scaled(20, least=5)
#: Nothing of what the listener has not taken yet is thrown away.
KEEPS_ALL = "max_queued_messages 0"
KILLS = 2

#: Keeps a figure with the report of the test.
Record = Callable[[str, object], None]


@pytest.fixture
def record(record_property: Record) -> Record:
    """Where to put what was measured."""

    def record(name: str, value: object) -> None:
        record_property(name, str(value))
        log.info("%s: %s", name, value)

    return record


class Listener:
    """Another client, by other people, with a session of its own: what it misses comes later."""

    def __init__(self, broker: Mosquitto) -> None:
        self._broker = broker
        # One for all connections: what a client has acknowledged is not forgotten with it.
        self._queue: asyncio.Queue[aiomqtt.Message] = asyncio.Queue()
        self.heard: defaultdict[str, list[str]] = defaultdict(list)
        self.subscribed = asyncio.Event()

    async def run(self) -> None:
        """Listen, whatever becomes of the broker, until somebody cancels this."""
        while True:
            try:
                async with self._client() as client:
                    await client.subscribe("to/+", qos=1)
                    self.subscribed.set()
                    async for message in client.messages:
                        self._hear(message)
            except aiomqtt.MqttError:
                self.subscribed.clear()
                while not self._queue.empty():
                    self._hear(self._queue.get_nowait())
                await asyncio.sleep(0.02)

    def _client(self) -> aiomqtt.Client:
        options = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        options.SessionExpiryInterval = 3600
        queue: Any = lambda maxsize: self._queue  # noqa: E731
        return aiomqtt.Client(
            "127.0.0.1",
            self._broker.port,
            identifier="listener",
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=False,
            properties=options,
            queue_type=queue,
        )

    def _hear(self, message: aiomqtt.Message) -> None:
        assert isinstance(message.payload, bytes)
        ((name, id),) = message.properties.UserProperty  # type: ignore[union-attr]
        assert (name, id.encode()) == ("message-id", message.payload)
        self.heard[str(message.topic)].append(id)

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, broker: Mosquitto) -> AsyncIterator[Listener]:
        """One that listens already."""
        listener = cls(broker)
        task = asyncio.create_task(listener.run())
        try:
            await until(lambda: listener.subscribed.is_set() or task.done())
            assert not task.done(), task.result()
            yield listener
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def connected(broker: Mosquitto, **options: Any) -> AsyncIterator[tuple[Session, FaultProxy]]:
    """A session behind a proxy that can cut its link."""
    async with (
        FaultProxy("127.0.0.1", broker.port) as proxy,
        Sessions(backoff=Backoff(0.01, 0.1), connect_rate=1000, connect_timeout=10) as sessions,
    ):
        uri = f"mqtt://127.0.0.1:{proxy.port}"
        protocol = Mqtt(uri, subscribe=(), keepalive=1, patience=1, **options)
        yield await sessions.connect("alice", protocol), proxy


async def has_come(storm: Storm, listener: Listener) -> None:
    """Whatever has left the session has come to the listener by now, if it ever will."""
    await asyncio.wait_for(listener.subscribed.wait(), 30)
    last = await storm.last()
    await until(lambda: last in listener.heard["to/last"])


@pytest.mark.parametrize("session_expiry", [0, 3600])
async def test_a_link_that_is_cut_again_and_again(session_expiry: int, record: Record) -> None:
    rng = random.Random(base_seed() + session_expiry)
    with Mosquitto(require_server("mosquitto"), KEEPS_ALL) as broker:
        async with (
            Listener.listening(broker) as listener,
            connected(broker, session_expiry=session_expiry) as (session, proxy),
        ):
            storm = Storm(session, rng)
            fault = Faults(proxy, session, storm, rng)
            await storm.run(SENDS, [fault] * CUTS)
            await has_come(storm, listener)
            lost, again = storm.check(lambda recipient: listener.heard[recipient])
            assert session.status()["reconnects"] >= CUTS
    record("outcomes", storm.counts())
    record("lost, came again", (lost, again))
    assert storm.counts()["Acked"] > SENDS / 4
    if session_expiry:
        # The server knows the session, so it says what became of each send in the end. (None is put
        # aside: others are in flight whenever a link is cut, and every third dies of silence.)
        assert storm.counts()["Unknown"] == 0


@pytest.mark.parametrize(
    ("persistence", "session_expiry"), [(True, 3600), (False, 3600), (False, 0)]
)
async def test_a_broker_that_is_killed_twice_besides(
    persistence: bool, session_expiry: int, record: Record
) -> None:
    rng = random.Random(base_seed() + 1)
    binary = require_server("mosquitto")
    with Mosquitto(binary, KEEPS_ALL, persistence=persistence) as broker:
        async with (
            Listener.listening(broker) as listener,
            connected(broker, session_expiry=session_expiry) as (session, proxy),
        ):
            storm = Storm(session, rng)

            async def kill() -> None:
                await session.online(30)
                await until(lambda: session.status()["acked"] > 10)
                broker.kill()
                await until(lambda: session.state != "online")
                await asyncio.to_thread(broker.start)

            faults = [Faults(proxy, session, storm, rng)] * CUTS
            await storm.run(SENDS, rng.sample([*faults, *[kill] * KILLS], CUTS + KILLS))
            await has_come(storm, listener)
            # What was confirmed is with the broker, and may be gone with it; all else holds.
            lost, again = storm.check(lambda recipient: listener.heard[recipient], lossy=True)
    record("outcomes", storm.counts())
    record("lost, came again", (lost, again))
    assert storm.counts()["Acked"] > SENDS / 4


@pytest.mark.parametrize("persistence", [True, False])
async def test_what_a_broker_has_confirmed_is_its_own_to_keep(
    persistence: bool, record: Record
) -> None:
    binary = require_server("mosquitto")
    with Mosquitto(binary, KEEPS_ALL, persistence=persistence) as broker:
        async with connected(broker) as (session, _):
            async with Listener.listening(broker):
                pass  # it has subscribed, and is away now
            sends = [session.send("to/bob", b"%d" % n, id=f"{n}") for n in range(20)]
            assert len(await asyncio.gather(*sends)) == 20
            if persistence:
                # Mosquitto confirms first, and writes a moment later.
                await until(lambda: b"message-id\x00\x0219" in broker.database.read_bytes())
            broker.kill()
            await until(lambda: session.state != "online")
            await asyncio.to_thread(broker.start)
            async with Listener.listening(broker) as listener:
                await session.send("to/last", b"last", id="last", hold=True)
                await until(lambda: listener.heard["to/last"])
                lost = 20 - len(listener.heard["to/bob"])
    record("lost", lost)
    assert lost == (0 if persistence else 20)
