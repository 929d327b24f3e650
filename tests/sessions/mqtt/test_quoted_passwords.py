"""A broker may quote a client's password: nothing that is reported shows it."""

from __future__ import annotations

import logging
from typing import Any

import mqtt5
import pytest
from tests.sessions.mqtt.scripted import ScriptedBroker
from tests.sessions.support import until

from moored.sessions import Rejected, Sessions
from moored.sessions.mqtt import Mqtt

PASSWORD = "tr0ub4dor"
QUOTING = f"no such login: {PASSWORD}"


@pytest.mark.parametrize("source", ["uri", "credentials"])
async def test_password_quoted_by_the_broker_is_hidden(
    source: str, sessions: Sessions, scripted: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moored.sessions")
    seen: list[Any] = []
    if source == "uri":
        protocol = Mqtt(f"mqtt://user:{PASSWORD}@127.0.0.1:{scripted.port}")
        alice = await sessions.connect("alice", protocol, on_event=seen.append)
    else:
        alice = await sessions.connect(
            "alice",
            Mqtt(scripted.url),
            on_event=seen.append,
            credentials=lambda profile: Mqtt.credentials("user", PASSWORD),
        )
    refusal = mqtt5.PubAckReasonCode.QUOTA_EXCEEDED
    scripted.on_publish = lambda packet: mqtt5.PubAckPacket(
        packet.packet_id or 0, reason_code=refusal, reason_str=QUOTING
    ).write()
    outcome = await alice.send("bob", b"x", outcome=True)
    assert isinstance(outcome, Rejected)
    taken_over = mqtt5.DisconnectReasonCode.SESSION_TAKEN_OVER
    scripted.send(mqtt5.DisconnectPacket(reason_code=taken_over, reason_str=QUOTING).write())
    await until(lambda: alice.state == "offline/refused")
    await until(lambda: "refused" in str(seen))
    reported = f"{outcome} {alice.status()} {seen} {caplog.text} {sessions.recorder.events()}"
    assert "no such login: ***" in alice.status()["reason"]
    assert PASSWORD not in reported
