"""Settings and messages that no broker accepts are refused at construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moored.sessions.mqtt import Message, Mqtt, Will

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"delay": -1}, "delay=-1 must be from 0 to 4294967295"),
        ({"delay": 1 << 32}, "delay=4294967296 must be from 0"),
        ({"delay": 1.5}, "delay=1.5 must be a whole number"),
        ({"expiry": -1}, "expiry=-1 must be from 0"),
        ({"expiry": 1 << 32}, "expiry=4294967296 must be from 0"),
        ({"payload": 5}, "int is not bytes"),
        ({"payload": "\ud800"}, "UTF-8"),
        ({"qos": 3}, "qos=3 must be 0, 1 or 2"),
    ],
)
def test_invalid_will_is_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Will("gone", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": bytes(70_000)},
        {"content_type": "a\nb"},
        {"user_properties": (("a", "b", "c"), 5)},
        {"user_properties": ((1, 2),)},
    ],
)
def test_will_that_no_packet_can_hold_is_refused_with_the_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the will cannot be used"):
        Mqtt("mqtt://broker", will=Will("gone", **wrong))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"expiry": -1}, "expiry=-1 must be from 0 to 4294967295"),
        ({"expiry": 1 << 32}, "expiry=4294967296 must be from 0"),
        ({"response_topic": "answers/#"}, "response_topic"),
        ({"response_topic": "+"}, "response_topic"),
        ({"response_topic": ""}, "response_topic"),
        ({"payload": 5}, "int is not bytes"),
        ({"payload": None}, "NoneType is not bytes"),
    ],
)
def test_invalid_message_is_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Message(**{"payload": b"", **wrong})


@pytest.mark.parametrize("uri", ["mqtts://broker", "mqtt://broker"])
def test_key_without_a_certificate_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="key"):
        Mqtt(uri, key=Path("client.key"))
