"""What a protocol may use besides bytes: bounces, the end of a batch, steps for what comes in."""

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


async def test_a_bounce_after_the_confirmation_is_an_event(
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


async def test_a_bounce_before_the_confirmation_is_a_refusal(
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


async def test_the_end_of_a_batch_is_said_once_for_all_that_came_together(
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
    # What it returned was written: the server answers each of them, in a batch of its own.
    await until(lambda: batches.count(1) >= 10)
    assert alice.generation == 1


# -- steps for what comes in -----------------------------------------------------------------------


class Cipher:
    """Decrypts, once for each message, as a ratchet does; and has plumbing of its own."""

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
async def test_inbound_steps_come_before_the_consumer_and_may_send_and_use_records(
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
    # What a step has dealt with is acknowledged, and what it failed at is set aside.
    await until(lambda: server.mail("alice") == 1)
    await until(lambda: "message_set_aside" in [each.type for each in events])
    (aside,) = [each.data for each in events if each.type == "message_set_aside"]
    assert isinstance(aside.error, ValueError)
    assert alice.generation == 1


async def test_a_loop_over_events_gets_what_inbound_steps_made_of_them(
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


@pytest.mark.parametrize("when", ["in a step", "in a handler", "before it is taken again"])
async def test_a_message_is_decrypted_once_over_any_number_of_links(
    sessions: Sessions, server: DemoServer, when: str
) -> None:
    cipher, heard, may_go_on = Cipher(), list[str](), asyncio.Event()
    fails = when == "before it is taken again"

    async def handle(event: Incoming) -> None:
        if event.type == "messages_upsert":
            heard.append(event.data.content.text)
            await may_go_on.wait()
            if fails and len(heard) == 1:
                raise ValueError("once")

    if when == "in a step":
        cipher.gate.clear()
    if fails:
        may_go_on.set()
    alice = await sessions.connect(
        "alice", Demo(server), inbound_steps=cipher.steps, on_event=handle
    )
    server.deliver("alice", Text("olleh"))
    if when == "in a handler":
        await until(lambda: heard)
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
    assert heard == (["hello", "hello"] if fails else ["hello"])


async def test_a_consumer_that_is_replaced_in_the_middle_of_a_step_loses_nothing(
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


async def test_an_inbound_step_must_return_an_event(sessions: Sessions, server: DemoServer) -> None:
    with pytest.raises(TypeError, match="steps are pairs"):
        await sessions.start("bob", Demo(server), inbound_steps=[print])  # type: ignore[list-item]
    alice = await sessions.connect(
        "alice", Demo(server), inbound_steps=[("odd", lambda event, session: "text")]
    )
    events = collect(alice)
    server.deliver("alice", Text("hello"))
    await until(lambda: "message_set_aside" in [each.type for each in events])
    (aside,) = [each.data for each in events if each.type == "message_set_aside"]
    assert "the inbound step 'odd' must return the event" in str(aside.error)
