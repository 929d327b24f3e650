"""Redelivery of messages by a real broker after a failed handler, a lost link or a stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.mqtt.peers import connack
from tests.sessions.mqtt.peers import publish as published
from tests.sessions.peers import peer
from tests.sessions.support import LIMIT, until
from tests.stream_server import stream_server
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from moored.kernel import Backoff
from moored.sessions import Acked, Incoming, Msg, Sessions, Unknown
from moored.sessions.mqtt import Mqtt
from moored.sessions.mqtt._dialogue import OVERRUN
from moored.testing import FaultProxy

#: More messages than the receive maximum, so that a missing acknowledgement blocks the rest.
WINDOW, MESSAGES = 4, 12
#: Messages queued for a handler at once, and how long it takes for one, in seconds.
MANY, HANDLING_TIME = 60, 0.01
#: Longer than any test.
LONG = 3600.0


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    # (It then sends as many as our receive maximum allows, instead of its default of 20.)
    with Mosquitto(require_server("mosquitto"), "max_inflight_messages 0") as server:
        yield server


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(backoff=Backoff(0.01, 0.1, jitter="full")) as opened:
        yield opened


class RecordingHandler:
    """A handler that records messages, fails once at `fails_at`, and waits for `may_go_on`."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.fails_at: bytes | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, event: Incoming) -> None:
        if isinstance(event.data, Msg):
            self.begun.append(event.data.content)
            await self.may_go_on.wait()
            if event.data.content == self.fails_at:
                self.fails_at = None
                raise ValueError("once")


async def test_message_whose_handler_failed_is_set_aside_until_the_next_link(
    sessions: Sessions, broker: Mosquitto
) -> None:
    handler = RecordingHandler()
    handler.fails_at = b"0"
    bot = await sessions.connect(
        "failing", Mqtt(broker.url(), receive_maximum=WINDOW), on_event=handler
    )
    async with peer(broker) as client:
        for number in range(MESSAGES):
            await client.publish("failing", b"%d" % number, qos=1)
        # It delays no other message, and the link stays.
        await until(lambda: handler.begun[-1:] == [b"%d" % (MESSAGES - 1)])
        assert handler.begun == [b"%d" % number for number in range(MESSAGES)]
        assert bot.generation == 1
        await bot.disconnect()
        await bot.connect()
        await until(lambda: handler.begun[MESSAGES:] == [b"0"])
        for number in range(MESSAGES, 3 * MESSAGES):
            await client.publish("failing", b"%d" % number, qos=1)
        await until(lambda: handler.begun[-1:] == [b"%d" % (3 * MESSAGES - 1)])
    assert set(handler.begun) == {b"%d" % number for number in range(3 * MESSAGES)}
    assert handler.begun.count(b"0") == 2
    assert bot.status()["handler_failures"] == bot.status()["messages_set_aside"] == 1


async def test_handler_that_always_fails_does_not_stop_the_sends(
    sessions: Sessions, broker: Mosquitto
) -> None:
    def handle(event: Incoming) -> None:
        raise ValueError("at everything")

    bot = await sessions.connect("hopeless", Mqtt(broker.url()), on_event=handle)
    async with peer(broker) as client:
        for number in range(MANY):
            await client.publish("hopeless", b"%d" % number, qos=1)
            assert isinstance(await bot.send("bob", b"hello", timeout=LIMIT), Acked)
        await until(lambda: bot.status()["messages_set_aside"] == MANY)
    assert bot.generation == 1


@pytest.mark.every_loop
async def test_backlog_above_the_receive_maximum_is_accepted_after_a_lost_link(
    sessions: Sessions, broker: Mosquitto
) -> None:
    # Mosquitto does not count redelivered messages, and exceeds our receive maximum.
    handler = RecordingHandler()
    protocol = Mqtt(broker.url(), receive_maximum=WINDOW)
    bot = await sessions.connect("backlog", protocol, on_event=handler)
    handler.may_go_on.clear()
    async with peer(broker) as client:
        for number in range(MESSAGES):
            await client.publish("backlog", b"%d" % number, qos=1)
    await until(lambda: handler.begun)
    await bot.disconnect()
    handler.may_go_on.set()
    await bot.connect()
    await until(lambda: handler.begun[-1:] == [b"%d" % (MESSAGES - 1)])
    await until(lambda: not bot.status()["events_waiting"])
    assert bot.state == "online"
    assert "violated" not in bot.status()["reason"]
    assert set(handler.begun) == {b"%d" % number for number in range(MESSAGES)}


async def test_new_handler_gets_the_unfinished_message_of_the_old_one(
    sessions: Sessions, broker: Mosquitto
) -> None:
    first, second = RecordingHandler(), RecordingHandler()
    first.may_go_on.clear()
    bot = await sessions.connect("replaced", Mqtt(broker.url()), on_event=first)
    async with peer(broker) as client:
        await client.publish("replaced", b"1", qos=1)
        await until(lambda: first.begun)
        bot.attach(second)
        await until(lambda: second.begun == [b"1"])
        await client.publish("replaced", b"2", qos=1)
        await until(lambda: second.begun == [b"1", b"2"])
    assert first.begun == [b"1"]
    assert bot.generation == 1


# -- queued messages belong to their link ---------------------------------------------------------


class SlowHandler:
    """A handler that takes a while for each message, and waits for `may_go_on`."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.handled: list[bytes] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, event: Incoming) -> None:
        if isinstance(event.data, Msg):
            self.begun.append(event.data.content)
            await asyncio.sleep(HANDLING_TIME)
            await self.may_go_on.wait()
            self.handled.append(event.data.content)


async def publish(broker: Mosquitto, topic: str, numbers: range) -> list[bytes]:
    contents = [b"%d" % number for number in numbers]
    async with peer(broker) as client:
        for content in contents:
            await client.publish(topic, content, qos=1)
    return contents


@pytest.mark.parametrize("cuts", [1, 8])
async def test_messages_queued_when_a_link_is_lost_are_handled_once(
    sessions: Sessions, broker: Mosquitto, cuts: int
) -> None:
    slow, profile = SlowHandler(), f"lost-{cuts}"
    async with FaultProxy("127.0.0.1", broker.port) as proxy:
        protocol = Mqtt(f"mqtt://127.0.0.1:{proxy.port}")
        bot = await sessions.connect(profile, protocol, on_event=slow)
        slow.may_go_on.clear()
        sent = await publish(broker, profile, range(MANY))
        await until(lambda: bot.status()["received"] == MANY)
        slow.may_go_on.set()
        for _ in range(cuts):
            handled = len(slow.handled)
            await until(lambda at=handled: len(slow.handled) > at)  # type: ignore[misc]
            slow.may_go_on.clear()
            await until(lambda: len(slow.begun) > len(slow.handled))  # the next one has begun
            begun = len(slow.begun)
            generation = bot.generation
            proxy.reset()
            await until(lambda at=generation: bot.generation > at and bot.state == "online")  # type: ignore[misc]
            # The broker has sent them all again, and they are queued behind the current one.
            await until(lambda: bot.status()["events_waiting"] >= MANY - len(set(slow.handled)))
            assert len(slow.begun) == begun
            slow.may_go_on.set()
        await until(lambda: set(slow.handled) == set(sent) and not bot.status()["events_waiting"])
        status = bot.status()
    # Only a message whose acknowledgement was lost can have been handled twice.
    assert len(slow.begun) <= MANY + cuts, Counter(slow.begun).most_common(3)
    assert list(dict.fromkeys(slow.begun)) == sent
    assert status["events_dropped"] == 0
    assert status["events_returned"] >= MANY / 2
    assert status["generation"] == 1 + cuts, "the session has closed its own link"


async def test_handler_that_outlasts_several_links_runs_once(
    sessions: Sessions, broker: Mosquitto
) -> None:
    slow, profile = SlowHandler(), "long"
    async with FaultProxy("127.0.0.1", broker.port) as proxy, peer(broker) as client:
        protocol = Mqtt(f"mqtt://127.0.0.1:{proxy.port}")
        bot = await sessions.connect(profile, protocol, on_event=slow)
        slow.may_go_on.clear()
        for content in (b"first", b"second"):
            await client.publish(profile, content, qos=1)
        await until(lambda: slow.begun)
        for generation in (2, 3, 4):
            proxy.reset()
            await until(lambda at=generation: bot.generation == at and bot.state == "online")  # type: ignore[misc]
        slow.may_go_on.set()
        await until(lambda: slow.handled == [b"first", b"second"])
        await client.publish(profile, b"third", qos=1)
        await until(lambda: slow.handled == [b"first", b"second", b"third"])
        # The broker has the acknowledgement: nothing is redelivered.
        await bot.disconnect()
        await bot.connect()
        await client.publish(profile, b"fourth", qos=1)
        await until(lambda: slow.handled[3:])
    assert slow.handled == [b"first", b"second", b"third", b"fourth"]


async def test_messages_that_the_broker_has_lost_are_still_handled(
    sessions: Sessions,
) -> None:
    with Mosquitto(require_server("mosquitto")) as broker:
        slow = SlowHandler()
        bot = await sessions.connect("forgotten", Mqtt(broker.url()), on_event=slow)
        slow.may_go_on.clear()
        sent = await publish(broker, "forgotten", range(MESSAGES))
        await until(lambda: bot.status()["received"] == MESSAGES and slow.begun)
        broker.kill()
        await until(lambda: bot.state != "online")
        slow.may_go_on.set()
        await until(lambda: slow.handled == sent[:1])
        # No other message is begun before it is known whether the broker still has it.
        assert slow.begun == sent[:1]
        broker.start()
        await until(lambda: slow.handled == sent)
        assert bot.status()["events_returned"] == 0


async def test_messages_that_the_broker_does_not_keep_survive_a_lost_link(
    sessions: Sessions, broker: Mosquitto
) -> None:
    slow = SlowHandler()
    bot = await sessions.connect("kept", Mqtt(broker.url(), session_expiry=0), on_event=slow)
    slow.may_go_on.clear()
    sent = await publish(broker, "kept", range(MESSAGES))
    await until(lambda: bot.status()["received"] == MESSAGES)
    await bot.disconnect()
    slow.may_go_on.set()
    await until(lambda: slow.handled == sent)
    await bot.connect()
    assert await publish(broker, "kept", range(1)) == [b"0"]
    await until(lambda: slow.handled == [*sent, b"0"])


async def test_handler_replaced_while_offline_causes_no_duplicates(
    sessions: Sessions, broker: Mosquitto
) -> None:
    first, second = SlowHandler(), SlowHandler()
    bot = await sessions.connect("attached", Mqtt(broker.url()), on_event=first)
    first.may_go_on.clear()
    sent = await publish(broker, "attached", range(MESSAGES))
    await until(lambda: bot.status()["received"] == MESSAGES and first.begun)
    await bot.disconnect()
    bot.attach(second)  # the unfinished message of the first one returns to the queue
    await bot.connect()
    await until(lambda: second.handled == sent)
    assert first.begun == sent[:1]
    assert bot.status()["events_returned"] == MESSAGES


# -- a broker that keeps nothing -------------------------------------------------------------------


async def test_broker_that_keeps_nothing_loses_no_message_and_sends_are_settled_with_the_link() -> (
    None
):
    links: list[asyncio.StreamWriter] = []

    async def forgetful(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.append(writer)
        await reader.read(1)
        writer.write(connack(session_expiry_interval=0))
        for number in range(1, MESSAGES + 1):
            writer.write(published(number, payload=b"%d" % number))
        while await reader.read(65536):
            pass

    slow = SlowHandler()
    slow.may_go_on.clear()
    async with (
        stream_server(forgetful) as port,
        Sessions(backoff=Backoff(LONG, LONG)) as sessions,
    ):
        protocol = Mqtt(f"mqtt://127.0.0.1:{port}", subscribe=())
        alice = await sessions.connect("alice", protocol, on_event=slow)
        sending = asyncio.create_task(alice.send("bob", b"hello", outcome=True, timeout=LONG))
        await until(lambda: alice.status()["sending"] and slow.begun)
        links[0].transport.abort()
        # No later link can confirm it.
        assert isinstance(await asyncio.wait_for(sending, 30), Unknown)
        await alice.connect()
        await until(lambda: alice.status()["received"] == 2 * MESSAGES)
        stopping = asyncio.create_task(alice.stop())
        slow.may_go_on.set()
        await stopping
    assert slow.handled == [b"%d" % number for number in [*range(1, MESSAGES + 1)] * 2]


@pytest.mark.parametrize("events", [1000, 600])
async def test_messages_above_the_limit_arrive_over_several_links(events: int) -> None:
    # (The limit of the dialogue applies, or that of the event queue.)
    most = min(events, OVERRUN) * 2
    kept = dict.fromkeys(range(1, most))
    links = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal links
        links += 1
        await reader.read(1)
        writer.write(connack(session_present=links > 1))
        if links > 1:
            for number in kept:
                writer.write(published(number, payload=b"%d" % number, duplicate=True))
        received = b""
        while more := await reader.read(65536):
            received += more
            while (at := received.find(b"\x40\x02")) >= 0 and len(received) >= at + 4:
                kept.pop(int.from_bytes(received[at + 2 : at + 4], "big"), None)
                received = received[at + 4 :]

    handler = RecordingHandler()
    async with (
        stream_server(floods) as port,
        Sessions(backoff=Backoff(0.01, 0.1), events=events) as sessions,
    ):
        protocol = Mqtt(f"mqtt://127.0.0.1:{port}", subscribe=())
        alice = await sessions.connect("alice", protocol, on_event=handler)
        await alice.disconnect()
        await alice.connect()
        await until(lambda: not kept)
        await alice.stop()
    assert handler.begun == [b"%d" % number for number in range(1, most)]
    assert links == 3


# -- a stop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "close", "iterator"])
async def test_stop_during_a_handler_causes_no_duplicates(broker: Mosquitto, how: str) -> None:
    slow, profile = SlowHandler(), f"stopped-{how}"
    protocol = Mqtt(broker.url())

    async def loop(events: AsyncIterator[Incoming]) -> None:
        async for event in events:
            await slow(event)

    async with Sessions() as old:
        bot = await old.connect(profile, protocol, on_event=None if how == "iterator" else slow)
        loops = asyncio.create_task(loop(bot.events())) if how == "iterator" else None
        sent = await publish(broker, profile, range(MANY))
        await until(lambda: len(slow.handled) >= 5)
        begun = len(slow.begun)
        await (old.close() if how == "close" else bot.stop())
        assert len(slow.begun) <= begun + 1
        assert slow.handled == slow.begun, "the current message was not finished"
        if loops is not None:
            await asyncio.wait_for(loops, 30)
    async with Sessions() as new:
        await new.connect(profile, protocol, on_event=slow)
        await until(lambda: len(slow.handled) >= MANY)
    assert slow.handled == sent


@pytest.mark.parametrize(
    "option", [{"clean_start": True}, {"client_id": ""}, {"session_expiry": 0}]
)
async def test_stop_handles_all_queued_messages_if_no_later_session_gets_them(
    broker: Mosquitto, option: dict[str, Any]
) -> None:
    slow, profile = SlowHandler(), f"last-{'-'.join(option)}"
    async with Sessions() as sessions:
        bot = await sessions.connect(profile, Mqtt(broker.url(), **option), on_event=slow)
        slow.may_go_on.clear()
        sent = await publish(broker, profile, range(MESSAGES))
        await until(lambda: bot.status()["received"] == MESSAGES and slow.begun)
        stopping = asyncio.create_task(bot.stop())
        slow.may_go_on.set()
        await stopping
    assert slow.handled == sent


@pytest.mark.parametrize("option", [{"clean_start": True}, {"client_id": ""}])
async def test_stop_without_a_link_handles_all_queued_messages_if_no_later_session_gets_them(
    option: dict[str, Any],
) -> None:
    slow = SlowHandler()
    broker = Mosquitto(require_server("mosquitto"))
    async with Sessions(backoff=Backoff(LONG, LONG)) as sessions:
        with broker:
            bot = await sessions.connect("last", Mqtt(broker.url(), **option), on_event=slow)
            slow.may_go_on.clear()
            sent = await publish(broker, "last", range(MESSAGES))
            await until(lambda: bot.status()["received"] == MESSAGES and slow.begun)
        await until(lambda: bot.state == "connecting/waiting")
        slow.may_go_on.set()
        await bot.stop()
    assert slow.handled == sent


async def test_handler_that_runs_during_a_stop_can_still_send(broker: Mosquitto) -> None:
    asked = asyncio.Event()

    async def answer(event: Incoming) -> None:
        if isinstance(event.data, Msg):
            asked.set()
            await asyncio.sleep(HANDLING_TIME)
            await bot.send("answers", event.data.content)

    async with Sessions() as sessions, peer(broker) as client:
        await client.subscribe("answers", qos=1)
        bot = await sessions.connect("answering", Mqtt(broker.url()), on_event=answer)
        await client.publish("answering", b"hello", qos=1)
        await asked.wait()
        await bot.stop()
        async with asyncio.timeout(30):
            assert (await anext(aiter(client.messages))).payload == b"hello"
        assert sessions.totals()["mqtt"]["handler_failures"] == 0


# -- signs of life ---------------------------------------------------------------------------------


async def test_slowly_arriving_message_counts_as_a_sign_of_life(
    sessions: Sessions, broker: Mosquitto
) -> None:
    handler = RecordingHandler()
    async with FaultProxy("127.0.0.1", broker.ports["ws"]) as proxy:
        protocol = Mqtt(f"ws://127.0.0.1:{proxy.port}", keepalive=3, patience=1)
        bot = await sessions.connect("slow", protocol, on_event=handler)
        # The transfer takes longer than the allowed silence.
        proxy.throttle(20_000, "down")
        async with peer(broker) as client:
            await client.publish("slow", bytes(110_000), qos=1)
            await until(lambda: handler.begun)
        assert bot.generation == 1
        proxy.heal()


async def test_websocket_pings_are_not_a_sign_of_life_of_the_broker_behind(
    sessions: Sessions,
) -> None:
    async def proxy(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(connack())
        # The broker is gone, but the proxy between still sends pings.
        while True:
            await connection.ping()
            await asyncio.sleep(0.1)

    subprotocols = [Subprotocol("mqtt")]
    async with serve(proxy, "127.0.0.1", 0, subprotocols=subprotocols) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        protocol = Mqtt(f"ws://127.0.0.1:{port}", keepalive=1, patience=1, subscribe=())
        bot = await sessions.connect("behind", protocol)
        await until(lambda: "no answer to a ping" in bot.status()["reason"])
