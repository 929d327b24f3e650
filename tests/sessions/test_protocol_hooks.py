"""Hooks for protocols: bounces, the end of a batch, and inbound steps."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from tests.sessions.support import collect, until

from moored.sessions import Acked, Bounce, Incoming, Rejected, Session, Sessions, Text
from moored.testing.demo import Demo, DemoServer
from moored.testing.demo._frames import encode
from moored.testing.demo._protocol import DemoDialogue


async def test_bounce_after_the_confirmation_is_an_event(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    events = collect(alice)
    assert await alice.send("bob", b"", id="1") == Acked("1")
    server.bounce("alice", "1", 404, "no such account")
    await until(lambda: alice.status()["bounced"] == 1)
    await until(lambda: events[-1].type == "send_bounced")
    assert events[-1].data == Bounce("1", 404, "no such account")
    assert alice.status()["rejected"] == 0


async def test_bounce_before_the_confirmation_is_a_rejection(
    sessions: Sessions, server: DemoServer
) -> None:
    server.window = 1
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    sending = asyncio.ensure_future(alice.send("bob", b"", id="1", outcome=True))
    await until(lambda: server.received)
    server.bounce("alice", "1", 404)
    assert await sending == Rejected("1", 404)
    assert alice.status()["bounced"] == 0
    assert await alice.send("bob", b"", id="2") == Acked("2")


async def test_end_of_batch_is_called_once_for_events_received_together(
    sessions: Sessions, server: DemoServer
) -> None:
    batches: list[int] = []

    class Batching(DemoDialogue):
        __slots__ = ("count",)
        count: int

        def feed(self, data: bytes) -> Any:
            self.count = 0
            for event in super().feed(data):
                self.count += 1
                yield event

        def end_of_batch(self) -> bytes:
            batches.append(self.count)
            return encode({"k": "ping"})

    class Protocol(Demo):
        def begin(self, profile: str, credentials: bytes | None, memory: Any) -> DemoDialogue:
            return Batching(profile, credentials, memory)

    alice = await sessions.connect("alice", Protocol(server))
    presence = encode({"k": "presence", "who": "bob", "state": "available"})
    server.say("alice", presence * 5)
    await until(lambda: 5 in batches)
    # The bytes that it returned were written: the server answers each in its own batch.
    await until(lambda: batches.count(1) >= 10)
    assert alice.generation == 1


# -- inbound steps -----------------------------------------------------------------------


class Cipher:
    """An inbound step that must see each message once, as a ratchet must."""

    def __init__(self) -> None:
        self.steps = [("decrypt", self.decrypt)]
        self.decrypted: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def decrypt(self, event: Incoming, session: Session) -> Incoming | None:
        if event.type != "messages_upsert":
            return event
        words = event.data.content.text
        await self.gate.wait()
        if words == "broken":
            # A retry receipt: it is sent, and confirmed, in the middle of a step.
            await session.send(event.data.sender, Text("again, please"))
            raise ValueError("out of step")
        await session.records.update("session", "bob", lambda old: (old or b"") + b".")
        self.decrypted.append(words)
        if words == "pre-keys":
            return None
        clear = dataclasses.replace(event.data, content=Text(words[::-1]))
        return dataclasses.replace(event, data=clear)


def texts(events: list[Incoming]) -> list[str]:
    return [each.data.content.text for each in events if each.type == "messages_upsert"]


@pytest.mark.every_loop
async def test_inbound_steps_run_before_the_consumer_and_can_send_and_update_records(
    sessions: Sessions, server: DemoServer
) -> None:
    cipher = Cipher()
    alice = await sessions.connect("alice", Demo(server), inbound_steps=cipher.steps)
    events = collect(alice)
    for words in ("olleh", "pre-keys", "broken", "dlrow"):
        server.deliver("alice", Text(words), sender="bob")
    await until(lambda: texts(events) == ["hello", "world"])
    assert await alice.records.get("session", "bob") == b"..."
    assert [each.recipient for each in server.received] == ["bob"]
    # A message that a step has consumed is acknowledged; one at which it failed is set aside.
    await until(lambda: server.mail("alice") == 1)
    await until(lambda: "message_set_aside" in [each.type for each in events])
    (aside,) = [each.data for each in events if each.type == "message_set_aside"]
    assert isinstance(aside.error, ValueError)
    assert alice.generation == 1


async def test_loop_over_events_gets_the_results_of_inbound_steps(
    sessions: Sessions, server: DemoServer
) -> None:
    cipher = Cipher()
    alice = await sessions.connect("alice", Demo(server), inbound_steps=cipher.steps)
    for words in ("broken", "pre-keys", "olleh"):
        server.deliver("alice", Text(words), sender="bob")
    async with alice.events() as events:
        async for event in events:
            if event.type == "messages_upsert":
                assert event.data.content == Text("hello")
                break
    await until(lambda: server.mail("alice") == 1)
    assert alice.status()["messages_set_aside"] == 1


@pytest.mark.parametrize("when", ["during a step", "during a handler", "after a failed handler"])
async def test_message_is_decrypted_once_over_any_number_of_links(
    sessions: Sessions, server: DemoServer, when: str
) -> None:
    cipher, received, may_go_on = Cipher(), list[str](), asyncio.Event()
    fails = when == "after a failed handler"

    async def handle(event: Incoming) -> None:
        if event.type == "messages_upsert":
            received.append(event.data.content.text)
            await may_go_on.wait()
            if fails and len(received) == 1:
                raise ValueError("once")

    if when == "during a step":
        cipher.gate.clear()
    if fails:
        may_go_on.set()
    alice = await sessions.connect(
        "alice", Demo(server), inbound_steps=cipher.steps, on_event=handle
    )
    server.deliver("alice", Text("olleh"))
    if when == "during a handler":
        await until(lambda: received)
    elif fails:
        await until(lambda: alice.status()["messages_set_aside"])
    else:
        await until(lambda: alice._runtime.sink._consumer is not None)
    server.cut("alice")
    await until(lambda: alice.generation == 2 and alice.state == "online")
    cipher.gate.set()
    may_go_on.set()
    await until(lambda: server.mail("alice") == 0)
    assert cipher.decrypted == ["olleh"]
    assert received == (["hello", "hello"] if fails else ["hello"])


async def test_consumer_replaced_during_an_inbound_step_loses_no_message(
    sessions: Sessions, server: DemoServer
) -> None:
    cipher = Cipher()
    cipher.gate.clear()
    first: list[Incoming] = []
    alice = await sessions.connect(
        "alice", Demo(server), inbound_steps=cipher.steps, on_event=first.append
    )
    server.deliver("alice", Text("olleh"))
    await until(lambda: alice.status()["received"] == 1)
    second = collect(alice)
    cipher.gate.set()
    await until(lambda: texts(second) == ["hello"])
    assert texts(first) == []
    await until(lambda: server.mail("alice") == 0)


async def test_inbound_step_that_returns_another_type_sets_the_message_aside(
    sessions: Sessions, server: DemoServer
) -> None:
    with pytest.raises(TypeError, match="steps are pairs"):
        await sessions.start("bob", Demo(server), inbound_steps=[print])  # type: ignore[list-item]
    alice = await sessions.connect(
        "alice", Demo(server), inbound_steps=[("wrong", lambda event, session: "text")]
    )
    events = collect(alice)
    server.deliver("alice", Text("hello"))
    await until(lambda: "message_set_aside" in [each.type for each in events])
    (aside,) = [each.data for each in events if each.type == "message_set_aside"]
    assert "the inbound step 'wrong' must return an Incoming" in str(aside.error)
