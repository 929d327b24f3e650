"""Dialogues with a real Mosquitto."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import aiomqtt
import pytest
from tests.postgres.certificates import Authority
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.mqtt.driver import Driver, outgoing
from tests.sessions.mqtt.peers import room

from moored.sessions._content import Msg
from moored.sessions._protocol import (
    CloseClass,
    Closing,
    Confirmed,
    Happening,
    Ignored,
    Ready,
    Refused,
    Unhandled,
)
from moored.sessions.mqtt import Message, Mqtt, MqttMemory, Publication, Will

Dial = Callable[..., Awaitable[Driver]]


@pytest.fixture
def name() -> str:
    """A profile that no other test uses."""
    return f"profile-{uuid4().hex[:12]}"


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Make links, and abort those that are open at the end of the test."""
    drivers: list[Driver] = []

    async def dial(protocol: Mqtt, profile: str, memory: MqttMemory | None = None) -> Driver:
        drivers.append(await Driver.dial(protocol, profile, memory))
        return drivers[-1]

    yield dial
    for driver in drivers:
        if not driver.lost_with:
            await driver.break_off()


def received(driver: Driver) -> list[Publication]:
    return [event.frame for event in driver.of(Happening)]


@pytest.mark.every_loop
@pytest.mark.parametrize("scheme", ["mqtt", "mqtts", "ws", "wss"])
async def test_hundred_sends_are_confirmed_and_arrive_in_order(
    dial: Dial, broker: Mosquitto, authority: Authority, name: str, scheme: str
) -> None:
    trust = {"ca": authority.root} if scheme in ("mqtts", "wss") else {}
    protocol = Mqtt(broker.url(scheme), **trust)  # type: ignore[arg-type]
    alice = await dial(protocol, name)
    bob = await dial(protocol, f"{name}-bob")
    bob.acknowledges = True
    window = alice.of(Ready)[0].window
    assert window == 20, "Mosquitto's default receive maximum is 20"
    for number in range(100):
        await alice.until(lambda: room(alice.dialogue))
        send = outgoing(f"{number}", b"%d" % number, f"{name}-bob")
        alice.write(alice.dialogue.write(send))
    await alice.until(lambda: len(alice.of(Confirmed)) == 100)
    assert {event.id for event in alice.of(Confirmed)} == {f"{number}" for number in range(100)}
    await bob.until(lambda: len(received(bob)) == 100)
    assert [one.payload for one in received(bob)] == [b"%d" % n for n in range(100)]
    assert [one.id for one in received(bob)] == [f"{number}" for number in range(100)]
    assert {one.topic for one in received(bob)} == {f"{name}-bob"}
    for driver in (alice, bob):
        await driver.end()


async def test_confirmation_reports_that_no_subscriber_matched(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    alice = await dial(Mqtt(broker.url(), subscribe=()), name)
    alice.write(alice.dialogue.write(outgoing("1", recipient=f"{name}/nobody")))
    await alice.until(lambda: alice.of(Confirmed))
    assert alice.of(Confirmed) == [Confirmed("1", "no matching subscribers")]
    await alice.end()


async def test_aborted_session_resumes_and_writes_unconfirmed_sends_again(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    protocol = Mqtt(broker.url())
    memory = protocol.remember()
    first = await dial(protocol, name, memory)
    assert first.of(Ready)[0].resumed is False
    written = first.dialogue.write(outgoing("whole", b"1", name))
    lost = first.dialogue.write(outgoing("lost", b"2", name))
    first.write(written + lost[:-1])  # the second one never arrives
    await first.until(lambda: first.of(Confirmed) and received(first))
    await first.break_off()

    second = await dial(protocol, name, memory)
    assert second.of(Ready)[0].resumed is True
    [(id, data)] = second.dialogue.resend({"lost"})
    assert id == "lost"
    assert data is not None
    assert data[0] & 0x08, "the DUP flag is missing"
    second.write(data)
    await second.until(lambda: second.of(Confirmed) and len(received(second)) == 2)
    assert second.of(Confirmed) == [Confirmed("lost")]
    # The client has not acknowledged the first message, so it is redelivered with DUP.
    whole, other = received(second)
    assert (whole.id, whole.duplicate) == ("whole", True)
    assert (other.id, other.payload, other.duplicate) == ("lost", b"2", False)
    await second.end()


async def test_messages_published_while_offline_arrive_after_reconnecting(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    protocol = Mqtt(broker.url())
    memory = protocol.remember()
    first = await dial(protocol, name, memory)
    await first.break_off()
    async with aiomqtt.Client(
        "127.0.0.1", broker.port, protocol=aiomqtt.ProtocolVersion.V5
    ) as peer:
        await peer.publish(name, b"while you were out", qos=1)
    second = await dial(protocol, name, memory)
    await second.until(lambda: received(second))
    assert received(second)[0].payload == b"while you were out"
    await second.end()


async def test_expired_session_is_not_resumed_and_nothing_is_written_again(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    protocol = Mqtt(broker.url(), session_expiry=0)
    memory = protocol.remember()
    first = await dial(protocol, name, memory)
    first.dialogue.write(outgoing("never"))
    await first.break_off()
    second = await dial(protocol, name, memory)
    assert second.of(Ready)[0].resumed is False
    assert list(second.dialogue.resend({"never"})) == []
    await second.end()


async def test_second_link_takes_over(dial: Dial, broker: Mosquitto, name: str) -> None:
    first = await dial(Mqtt(broker.url()), name)
    second = await dial(Mqtt(broker.url()), name)
    await first.until(lambda: first.lost_with)
    # Before 2.0.15, Mosquitto closes the old link without a DISCONNECT, against the standard.
    disconnects = broker.version >= (2, 0, 15)
    assert [event.kind for event in first.of(Closing)] == [CloseClass.TAKEOVER] * disconnects
    assert not second.lost_with
    await second.end()


@pytest.mark.parametrize("persistence", [True, False])
async def test_killed_broker_resumes_the_session_only_with_persistence(
    dial: Dial, name: str, persistence: bool
) -> None:
    with Mosquitto(require_server("mosquitto"), persistence=persistence) as server:
        protocol = Mqtt(server.url())
        memory = protocol.remember()
        first = await dial(protocol, name, memory)
        first.write(first.dialogue.write(outgoing("1", b"1", name)))
        await first.until(lambda: first.of(Confirmed))
        server.kill()
        await first.until(lambda: first.lost_with)
        first.dialogue.write(outgoing("2", b"2", name))
        server.start()
        second = await dial(protocol, name, memory)
        assert second.of(Ready)[0].resumed is persistence
        ids = [id for id, _ in second.dialogue.resend({"2"})]
        assert ids == (["2"] if persistence else [])
        await second.end()


async def test_wrong_password_is_final_and_the_right_one_works(dial: Dial, name: str) -> None:
    binary = require_server("mosquitto")
    with Mosquitto(binary, users={"bob": "s3cret/ö"}) as server:
        wrong = await dial(Mqtt(server.url(user="bob:wrong")), name)
        [closing] = wrong.of(Closing)
        assert closing.kind is CloseClass.AUTHENTICATION
        assert closing.kind.final
        right = await dial(Mqtt(server.url(user="bob:s3cret%2F%C3%B6")), name)
        assert right.of(Ready)
        await right.end()
        await wrong.break_off()


async def test_refused_publish_affects_no_other_send(dial: Dial, name: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(f"topic readwrite open/#\ntopic read {name}\n")
    with Mosquitto(require_server("mosquitto"), f"acl_file {rules}") as server:
        protocol = Mqtt(server.url(), subscribe=["{profile}", "closed/#"])
        alice = await dial(protocol, name)
        alice.write(alice.dialogue.write(outgoing("1", recipient="closed/1")))
        alice.write(alice.dialogue.write(outgoing("2", recipient="open/1")))
        await alice.until(lambda: alice.of(Refused) and alice.of(Confirmed))
        assert alice.of(Refused) == [Refused("1", 0x87, "not authorized")]
        assert [event.id for event in alice.of(Confirmed)] == ["2"]
        await alice.end()


async def test_limits_of_the_server_are_respected(dial: Dial, name: str) -> None:
    options = ("max_keepalive 10", "max_packet_size 1000", "max_inflight_messages 3")
    with Mosquitto(require_server("mosquitto"), *options) as server:
        alice = await dial(Mqtt(server.url(), keepalive=60), name)
        assert alice.of(Ready) == [Ready(False, 3, 10.0)]
        with pytest.raises(Exception, match=r"1,?\d+ bytes, and the server accepts 1000"):
            alice.dialogue.write(outgoing("1", bytes(1000)))
        alice.write(alice.dialogue.ping())
        await alice.until(lambda: alice.of(Ignored))
        await alice.end()


async def test_text_properties_and_retained_messages_interoperate_with_another_client(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    alice = await dial(Mqtt(broker.url(), topic="{recipient}/in"), name)
    version = aiomqtt.ProtocolVersion.V5
    async with aiomqtt.Client("127.0.0.1", broker.port, protocol=version) as peer:
        await peer.subscribe(f"{name}/+/in", qos=1)
        message = Message(
            "grüße",
            retain=True,
            expiry=60,
            content_type="text/plain",
            response_topic=name,
            correlation_data=b"\x00\xff",
            user_properties=(("a", "b"), ("a", "c")),
        )
        alice.write(alice.dialogue.write(outgoing("id-1", message, f"{name}/1")))
        got = await anext(peer.messages)
        assert str(got.topic) == f"{name}/1/in"
        assert got.payload == "grüße".encode()
        options = got.properties
        assert options is not None
        assert options.UserProperty == [("message-id", "id-1"), ("a", "b"), ("a", "c")]  # type: ignore[attr-defined]
        assert options.PayloadFormatIndicator == 1  # type: ignore[attr-defined]
        assert options.CorrelationData == b"\x00\xff"  # type: ignore[attr-defined]
        assert options.ResponseTopic == name  # type: ignore[attr-defined]
        await peer.publish(name, "antwort", qos=2, properties=options)
        await alice.until(lambda: alice.of(Happening))
    frame = received(alice)[0]
    text = alice.protocol.interpret(alice.protocol.route(frame), frame)
    assert isinstance(text, Msg)
    assert (text.type, text.content.text, text.id, text.to) == ("text", "antwort", "id-1", name)
    late = await dial(Mqtt(broker.url(), subscribe=f"{name}/1/in"), f"{name}-late")
    await late.until(lambda: received(late))
    assert received(late)[0].retained
    for driver in (alice, late):
        await driver.end()


async def test_will_is_published_after_an_abort_or_a_goodbye_that_asks_for_it(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    watcher = await dial(Mqtt(broker.url(), subscribe=f"{name}/will/#"), f"{name}-watcher")

    def has_received(topic: str) -> bool:
        return topic in [one.topic for one in received(watcher)]

    for how, on_goodbye in (("break_off", False), ("end", True)):
        will = Will("{profile}/will/" + how, b"gone", on_goodbye=on_goodbye)
        alice = await dial(Mqtt(broker.url(), will=will, session_expiry=0), name)
        await getattr(alice, how)()
        await watcher.until(partial(has_received, f"{name}/will/{how}"))
    quiet = Mqtt(broker.url(), will=Will("{profile}/will/quiet"), session_expiry=0)
    await (await dial(quiet, name)).end()
    marker = await dial(Mqtt(broker.url()), name)
    marker.write(marker.dialogue.write(outgoing("1", recipient=f"{name}/will/marker")))
    await watcher.until(partial(has_received, f"{name}/will/marker"))
    assert not has_received(f"{name}/will/quiet")
    for driver in (marker, watcher):
        await driver.end()


async def test_client_id_chosen_by_the_server_is_reused(
    dial: Dial, broker: Mosquitto, name: str
) -> None:
    protocol = Mqtt(broker.url(), client_id="", subscribe=f"{name}/#")
    memory = protocol.remember()
    first = await dial(protocol, name, memory)
    chosen = memory.client_id
    assert chosen
    await first.break_off()
    second = await dial(protocol, name, memory)
    assert second.of(Ready)[0].resumed
    assert memory.client_id == chosen
    assert not second.of(Unhandled)
    await second.end()
