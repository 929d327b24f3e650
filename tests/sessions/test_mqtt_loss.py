"""MQTT links that are cut and brokers that are killed: every send has one, correct outcome."""

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
from tests.sessions.send_load import LinkFaults, SendLoad
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Session, Sessions
from moored.sessions.mqtt import Mqtt
from moored.testing import FaultProxy, base_seed, scaled

log = logging.getLogger(__name__)

SENDS = scaled(1000, least=200)
CUTS = scaled(20, least=5)
#: The broker drops no message that the listener has not received yet.
UNLIMITED_QUEUE = "max_queued_messages 0"
KILLS = 2

#: Adds a measured value to the report of the test.
Record = Callable[[str, object], None]


@pytest.fixture
def record(record_property: Record) -> Record:
    """Return a function that records a measured value."""

    def record(name: str, value: object) -> None:
        record_property(name, str(value))
        log.info("%s: %s", name, value)

    return record


class Listener:
    """A client of another library with a persistent session: missed messages arrive later."""

    def __init__(self, broker: Mosquitto) -> None:
        self._broker = broker
        # One queue for all connections: messages that a client has acknowledged are not lost.
        self._queue: asyncio.Queue[aiomqtt.Message] = asyncio.Queue()
        self.received: defaultdict[str, list[str]] = defaultdict(list)
        self.subscribed = asyncio.Event()

    async def run(self) -> None:
        """Receive until cancelled, and reconnect whenever the broker is lost."""
        while True:
            try:
                async with self._client() as client:
                    await client.subscribe("to/+", qos=1)
                    self.subscribed.set()
                    async for message in client.messages:
                        self._record(message)
            except aiomqtt.MqttError:
                self.subscribed.clear()
                while not self._queue.empty():
                    self._record(self._queue.get_nowait())
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

    def _record(self, message: aiomqtt.Message) -> None:
        assert isinstance(message.payload, bytes)
        ((name, id),) = message.properties.UserProperty  # type: ignore[union-attr]
        assert (name, id.encode()) == ("message-id", message.payload)
        self.received[str(message.topic)].append(id)

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, broker: Mosquitto) -> AsyncIterator[Listener]:
        """Yield a listener that has subscribed."""
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


async def all_arrived(load: SendLoad, listener: Listener) -> None:
    """Wait until every send that the session has written has arrived, if it ever will."""
    await asyncio.wait_for(listener.subscribed.wait(), 30)
    last = await load.last()
    await until(lambda: last in listener.received["to/last"])


@pytest.mark.parametrize("session_expiry", [0, 3600])
async def test_outcomes_are_correct_over_links_that_are_cut(
    session_expiry: int, record: Record
) -> None:
    rng = random.Random(base_seed() + session_expiry)
    with Mosquitto(require_server("mosquitto"), UNLIMITED_QUEUE) as broker:
        async with (
            Listener.listening(broker) as listener,
            connected(broker, session_expiry=session_expiry) as (session, proxy),
        ):
            load = SendLoad(session, rng)
            fault = LinkFaults(proxy, session, load, rng)
            await load.run(SENDS, [fault] * CUTS)
            await all_arrived(load, listener)
            lost, again = load.check(lambda recipient: listener.received[recipient])
            assert session.status()["reconnects"] >= CUTS
    record("outcomes", load.counts())
    record("lost, came again", (lost, again))
    assert load.counts()["Acked"] > SENDS / 4
    if session_expiry:
        # The broker resumes the session, so every send has a definite outcome. (None is given up:
        # others are in flight whenever a link is cut, and every third fault is a silent link.)
        assert load.counts()["Unknown"] == 0


@pytest.mark.parametrize(
    ("persistence", "session_expiry"),
    [
        (True, 3600),
        *(pytest.param(False, each, marks=pytest.mark.soak) for each in (3600, 0)),
    ],
)
async def test_outcomes_are_correct_if_the_broker_is_killed_twice(
    persistence: bool, session_expiry: int, record: Record
) -> None:
    rng = random.Random(base_seed() + 1)
    binary = require_server("mosquitto")
    with Mosquitto(binary, UNLIMITED_QUEUE, persistence=persistence) as broker:
        async with (
            Listener.listening(broker) as listener,
            connected(broker, session_expiry=session_expiry) as (session, proxy),
        ):
            load = SendLoad(session, rng)

            async def kill() -> None:
                await session.online(30)
                await until(lambda: session.status()["acked"] > 10)
                broker.kill()
                await until(lambda: session.state != "online")
                await asyncio.to_thread(broker.start)

            faults = [LinkFaults(proxy, session, load, rng)] * CUTS
            await load.run(SENDS, rng.sample([*faults, *[kill] * KILLS], CUTS + KILLS))
            await all_arrived(load, listener)
            # A killed broker may lose what it has confirmed; everything else must hold.
            lost, again = load.check(lambda recipient: listener.received[recipient], lossy=True)
    record("outcomes", load.counts())
    record("lost, came again", (lost, again))
    assert load.counts()["Acked"] > SENDS / 4


@pytest.mark.parametrize("persistence", [True, False])
async def test_killed_broker_keeps_confirmed_messages_only_with_persistence(
    persistence: bool, record: Record
) -> None:
    binary = require_server("mosquitto")
    with Mosquitto(binary, UNLIMITED_QUEUE, persistence=persistence) as broker:
        async with connected(broker) as (session, _):
            async with Listener.listening(broker):
                pass  # it stays subscribed while it is away
            sends = [session.send("to/bob", b"%d" % n, id=f"{n}") for n in range(20)]
            assert len(await asyncio.gather(*sends)) == 20
            if persistence:
                # Mosquitto confirms first, and writes to disk a moment later.
                await until(lambda: b"message-id\x00\x0219" in broker.database.read_bytes())
            broker.kill()
            await until(lambda: session.state != "online")
            await asyncio.to_thread(broker.start)
            async with Listener.listening(broker) as listener:
                await session.send("to/last", b"last", id="last", hold=True)
                await until(lambda: listener.received["to/last"])
                lost = 20 - len(listener.received["to/bob"])
    record("lost", lost)
    assert lost == (0 if persistence else 20)
