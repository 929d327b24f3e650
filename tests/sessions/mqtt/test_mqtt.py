"""The settings of MQTT: addresses, credentials, and invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mqtt5
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.postgres.certificates import Authority
from tests.sessions.mqtt.peers import connack, feed

from moored.sessions import mqtt
from moored.sessions._errors import SessionError
from moored.sessions._protocol import Feature
from moored.sessions.mqtt import Mqtt, MqttMemory, Will
from moored.sessions.transport._endpoints import Tcp, WebSocket

SECRET = "pässwörd"


def hello(protocol: Mqtt, profile: str = "alice", **more: Any) -> mqtt5.ConnectPacket:
    memory = more.pop("memory", None) or protocol.remember()
    data = protocol.begin(profile, more.get("credentials"), memory).hello()
    packet, size = mqtt5.read(memoryview(data))
    assert size == len(data)
    assert isinstance(packet, mqtt5.ConnectPacket)
    return packet


@pytest.mark.parametrize(
    ("uri", "kind", "address"),
    [
        ("mqtt://broker", Tcp, "broker:1883"),
        ("MQTT://Broker:1884/", Tcp, "broker:1884"),
        ("mqtt://[::1]:1884", Tcp, "[::1]:1884"),
        ("mqtts://broker", Tcp, "broker:8883 (TLS)"),
        ("ws://u:p@broker/path?token=x", WebSocket, "ws://broker:80/path?…"),
        ("wss://broker", WebSocket, "wss://broker:443/mqtt"),
    ],
)
def test_uri_selects_transport_and_address(uri: str, kind: type, address: str) -> None:
    endpoint = Mqtt(uri).endpoint
    assert type(endpoint) is kind
    assert str(endpoint) == address


def test_user_and_password_are_decoded_and_never_shown() -> None:
    protocol = Mqtt("mqtt://us%40er:p%C3%A4ssw%C3%B6rd@broker")
    packet = hello(protocol)
    assert (packet.username, packet.password) == ("us@er", SECRET.encode())
    dialogue = protocol.begin("alice", None, protocol.remember())
    for shown in (repr(protocol), repr(protocol.endpoint), repr(dialogue)):
        assert "ssw" not in shown
        assert "us@er" not in shown
    assert repr(protocol) == "<Mqtt mqtt://broker:1883, topic {recipient}>"


def test_stored_credentials_override_those_of_the_uri() -> None:
    protocol = Mqtt("mqtt://one:1@broker")
    packet = hello(protocol, credentials=Mqtt.credentials("two", SECRET))
    assert (packet.username, packet.password) == ("two", SECRET.encode())
    packet = hello(protocol, credentials=Mqtt.credentials("three"))
    assert (packet.username, packet.password) == ("three", None)
    packet = hello(protocol, credentials=Mqtt.credentials("", b"\0token\0"))
    assert (packet.username, packet.password) == ("", b"\0token\0")
    with pytest.raises(SessionError, match=r"not created by Mqtt\.credentials") as caught:
        hello(protocol, credentials=b"\xff\xfesecret")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="NUL"):
        Mqtt.credentials("a\0b")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("broker", "must begin with mqtt://, mqtts://, ws://, wss://"),
        ("http://broker", "must begin with mqtt://"),
        ("mqtt:broker", "must begin with mqtt://"),
        ("mqtt://", "no host"),
        ("mqtt://broker:0", "not a number from 1 to 65535"),
        ("mqtt://broker:99999", "not a number from 1 to 65535"),
        ("mqtt://user:hid/den@broker", "percent-encoded"),
        ("mqtt://user:hid?den@broker", "percent-encoded"),
        ("mqtt://user:hid#den@broker", "percent-encoded"),
        ("mqtt://broker/path", "a path, which only ws"),
        ("ws://broker/#hidden", "fragment"),
        ("mqtt://[::1", "brackets"),
        ("mqtt://bro ker", "a space"),
    ],
)
def test_invalid_uri_is_refused_without_showing_its_password(uri: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        Mqtt(uri)
    assert "hid" not in str(caught.value)
    assert caught.value.__cause__ is None


@given(st.text(max_size=30), st.text(max_size=30))
@example("wss://", "")
@example("", "the URI has no host")
def test_any_string_as_a_uri_is_accepted_or_refused_without_showing_secrets(
    before: str, after: str
) -> None:
    # (Hypothesis also draws strings from our source, which may be part of our own messages.)
    for text in (before, f"{before}{SECRET}{after}"):
        for uri in (text, f"mqtt://{text}", f"mqtt://user:{text}@broker", f"wss://{text}"):
            try:
                Mqtt(uri)
            except ValueError as error:
                message = str(error)
                assert message
                assert SECRET not in message


def test_all_invalid_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="Mqtt: ") as caught:
        Mqtt(
            "mqtt://broker",
            topic="{who}",
            client_id="{recipient}",
            subscribe=["", "{device}"],
            keepalive=0,
            session_expiry=-1,
            receive_maximum=0,
            send_window=65535,
            max_packet_size=5,
            will=Will("#"),
            ca="x",
            server_name="y",
        )
    message = str(caught.value)
    for part in (
        "topic has {who}, and only {profile} and {recipient} can be filled in",
        "client_id has {recipient}",
        "subscribe has an empty filter",
        "subscribe has {device}",
        "keepalive=0 must be more than 0",
        "session_expiry=-1 must be from 0 to 4294967295",
        "receive_maximum=0 must be from 1 to 65535",
        "send_window=65535 must be from 1 to 65534",
        "max_packet_size=5 must be from 128",
        "the will's topic must not be empty or have wildcards",
        "ca is for TLS, and mqtt:// has none",
        "server_name is for TLS",
    ):
        assert part in message


def test_settings_appear_in_the_connect_packet() -> None:
    protocol = Mqtt(
        "mqtt://broker",
        client_id="app-{profile}",
        keepalive=2.5,
        session_expiry=60,
        receive_maximum=7,
        max_packet_size=1000,
        will=Will("gone/{profile}", "bye", qos=2, retain=True, delay=3, expiry=9),
    )
    packet = hello(protocol)
    assert (packet.client_id, packet.keep_alive, packet.clean_start) == ("app-alice", 3, False)
    assert (packet.session_expiry_interval, packet.receive_max) == (60, 7)
    assert packet.max_packet_size == 1000
    will = packet.will
    assert will is not None
    assert (will.topic, will.payload, will.qos, will.retain) == ("gone/alice", b"bye", 2, True)
    assert (will.will_delay_interval, will.message_expiry_interval) == (3, 9)
    assert protocol.features == {Feature.TEXT, Feature.SUBSCRIPTIONS}
    assert protocol.resumes


def test_clean_start_is_requested_once_or_for_every_link() -> None:
    once = Mqtt("mqtt://broker", clean_start=True, subscribe=())
    memory = once.remember()
    assert hello(once, memory=memory).clean_start
    feed(once.begin("alice", None, memory), connack())
    assert not hello(once, memory=memory).clean_start, "the next link must resume this session"
    always = Mqtt("mqtt://broker", session_expiry=0, subscribe=())
    assert not always.resumes
    memory = always.remember()
    feed(always.begin("alice", None, memory), connack())
    assert hello(always, memory=memory).clean_start


def test_client_id_chosen_by_the_server_is_used_again() -> None:
    protocol = Mqtt("mqtt://broker", client_id="", subscribe=())
    memory = protocol.remember()
    assert hello(protocol, memory=memory).client_id == ""
    feed(protocol.begin("alice", None, memory), connack(assigned_client_id="chosen"))
    again = hello(protocol, memory=memory)
    assert (again.client_id, again.clean_start) == ("chosen", False)


@pytest.mark.parametrize("profile", ["#", "a/+", "a\0", "\ud800", "x" * 65536])
def test_profile_with_wildcards_or_invalid_characters_is_refused(profile: str) -> None:
    protocol = Mqtt("mqtt://broker")
    with pytest.raises(SessionError, match="the profile cannot be used with MQTT"):
        protocol.begin(profile, None, protocol.remember())


def test_placeholders_inside_a_profile_are_not_expanded() -> None:
    protocol = Mqtt("mqtt://broker", topic="{profile}/{recipient}")
    dialogue = protocol.begin("{recipient}", None, MqttMemory())
    assert dialogue._topic == ("{recipient}/", "")
    assert "bob".join(dialogue._topic) == "{recipient}/bob"


def test_tls_context_is_built_from_files(authority: Authority, tmp_path: Path) -> None:
    own = authority.sign("alice")
    protocol = Mqtt("mqtts://broker", ca=authority.root, certificate=own.certificate, key=own.key)
    assert isinstance(protocol.endpoint, Tcp)
    assert protocol.endpoint.tls is not None
    with pytest.raises(ValueError, match=r"ca=.*nothing.* cannot be used"):
        Mqtt("mqtts://broker", ca=tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"certificate=.*nothing.* cannot be used"):
        Mqtt("mqtts://broker", certificate=tmp_path / "nothing")
    with pytest.raises(ValueError, match="tls takes the place of ca"):
        Mqtt("mqtts://broker", ca=authority.root, tls=protocol.endpoint.tls)
    with pytest.raises(ValueError, match="server_name is for mqtts://"):
        Mqtt("wss://broker", server_name="x")


def test_public_names_are_unchanged() -> None:
    assert sorted(mqtt.__all__) == [
        "ID_PROPERTY",
        "Message",
        "MessageTooLarge",
        "Mqtt",
        "MqttDialogue",
        "MqttMemory",
        "Publication",
        "SubscriptionRefused",
        "Will",
    ]
