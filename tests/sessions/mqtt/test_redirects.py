"""Server redirects, and credentials that are fetched for each link."""

from __future__ import annotations

import mqtt5
import pytest
from tests.sessions.mqtt.scripted import ScriptedBroker
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Acked, NotConnected, Sessions
from moored.sessions.mqtt import Mqtt

ELSEWHERE = mqtt5.ConnAckReasonCode.USE_ANOTHER_SERVER
MOVED = mqtt5.DisconnectReasonCode.SERVER_MOVED

pytestmark = pytest.mark.every_loop


async def test_refusal_with_a_server_reference_is_followed(
    sessions: Sessions, scripted: ScriptedBroker, elsewhere: ScriptedBroker
) -> None:
    scripted.connack = {"reason_code": ELSEWHERE, "server_reference": f"127.0.0.1:{elsewhere.port}"}
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    assert isinstance(await alice.send("bob", b"x"), Acked)
    assert (scripted.payloads(), elsewhere.payloads()) == ([], [b"x"])
    # A lost link is dialed again at the new server.
    elsewhere.cut()
    await until(lambda: len(elsewhere.links) == 2)
    await alice.online(10)
    assert len(scripted.links) == 1


async def test_open_link_is_moved_to_the_referenced_server(
    sessions: Sessions, scripted: ScriptedBroker, elsewhere: ScriptedBroker
) -> None:
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    reference = f"127.0.0.1:{elsewhere.port} 127.0.0.2:1883"
    scripted.send(mqtt5.DisconnectPacket(reason_code=MOVED, server_reference=reference).write())
    await until(lambda: elsewhere.links)
    await alice.online(10)
    assert isinstance(await alice.send("bob", b"x"), Acked)
    assert elsewhere.payloads() == [b"x"]


async def test_host_of_selects_the_server_of_each_profile(
    sessions: Sessions, scripted: ScriptedBroker, elsewhere: ScriptedBroker
) -> None:
    hosts = {"alice": None, "bob": f"127.0.0.1:{elsewhere.port}", "eve": "a:b"}
    protocol = Mqtt(scripted.url, host_of=hosts.__getitem__)
    alice = await sessions.connect("alice", protocol)
    bob = await sessions.connect("bob", protocol)
    assert isinstance(await alice.send("carol", b"from alice"), Acked)
    assert isinstance(await bob.send("carol", b"from bob"), Acked)
    assert (scripted.payloads(), elsewhere.payloads()) == ([b"from alice"], [b"from bob"])
    # After a redirect to an unreachable server, a profile returns to its own server.
    away = mqtt5.DisconnectPacket(reason_code=MOVED, server_reference="127.0.0.1:1").write()
    elsewhere.send(away)
    await until(lambda: len(elsewhere.links) == 2)
    for profile, why in (("eve", "host_of returned 'a:b'"), ("mallory", "host_of failed")):
        with pytest.raises(NotConnected, match=why):
            await sessions.connect(profile, protocol)


async def test_unreachable_or_invalid_server_reference_returns_to_the_configured_server(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    for reference in ("127.0.0.1:1", "no reference", "[", "a:b", "x:99999"):
        before = len(scripted.links)
        scripted.send(mqtt5.DisconnectPacket(reason_code=MOVED, server_reference=reference).write())
        await until(lambda at=before: len(scripted.links) > at and alice.state == "online")  # type: ignore[misc]
        assert isinstance(await alice.send("bob", b"x"), Acked)


async def test_mutual_redirects_are_followed_with_pauses(
    scripted: ScriptedBroker, elsewhere: ScriptedBroker
) -> None:
    scripted.connack = {"reason_code": ELSEWHERE, "server_reference": f"127.0.0.1:{elsewhere.port}"}
    elsewhere.connack = {"reason_code": ELSEWHERE, "server_reference": f"127.0.0.1:{scripted.port}"}
    async with Sessions(backoff=Backoff(60.0, 60.0)) as sessions:
        alice = await sessions.start("alice", Mqtt(scripted.url))
        await until(lambda: alice.state == "connecting/waiting")
        assert len(scripted.links) + len(elsewhere.links) <= 5


async def test_credentials_are_fetched_for_each_link(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    tokens = iter([b"first", b"second"])

    async def fetch(profile: str) -> bytes:
        return Mqtt.credentials(profile, next(tokens))

    alice = await sessions.connect("alice", Mqtt(scripted.url), credentials=fetch)
    scripted.cut()
    await until(lambda: len(scripted.links) == 2)
    await alice.online(10)
    connects = scripted.sent(mqtt5.ConnectPacket)
    assert [(one.username, one.password) for one in connects] == [
        ("alice", b"first"),
        ("alice", b"second"),
    ]


async def test_failing_credentials_function_is_called_again(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    calls: list[str] = []

    def fetch(profile: str) -> bytes:
        calls.append(profile)
        if len(calls) < 3:
            raise LookupError("the token server is away")
        return Mqtt.credentials(profile)

    await sessions.connect("alice", Mqtt(scripted.url), credentials=fetch)
    assert calls == ["alice"] * 3


async def test_refused_credentials_are_fetched_once_more(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    scripted.accepts = lambda packet: packet.password == b"new"
    tokens = iter([b"old", b"new", b"expired", b"new", b"bad", b"bad too"])

    def fetch(profile: str) -> bytes:
        return Mqtt.credentials(profile, next(tokens))

    alice = await sessions.connect("alice", Mqtt(scripted.url), credentials=fetch)
    for links in (4, 6):
        scripted.cut()
        await until(lambda at=links: len(scripted.links) == at)  # type: ignore[misc]
        await until(lambda: alice.state in ("online", "offline/refused"))
    assert alice.state == "offline/refused"
    assert "bad user name" in alice.status()["reason"]
