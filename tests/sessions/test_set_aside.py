"""Messages at which a handler or the protocol fails are set aside and delay nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.sessions.support import until

from moored.sessions import Acked, Incoming, NotSent, Sessions, SetAside, Text
from moored.sessions.transport._transport import Receiver, Transport
from moored.testing import Sim, run_one
from moored.testing.demo import Demo, DemoServer


class FailingHandler:
    """A handler that raises at one message whenever it arrives."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.received: list[str] = []
        self.aside: list[SetAside] = []

    def __call__(self, event: Incoming) -> None:
        if event.type == "message_set_aside":
            self.aside.append(event.data)
        elif event.type == "messages_upsert":
            self.received.append(event.data.content.text)
            if event.data.content.text == self.at:
                raise ValueError("never")


@pytest.mark.every_loop
async def test_message_at_which_a_handler_fails_is_set_aside_and_reported(
    sessions: Sessions, server: DemoServer
) -> None:
    fails = FailingHandler(at="1")
    alice = await sessions.connect("alice", Demo(server), on_event=fails)
    for number in range(4):
        server.deliver("alice", Text(str(number)))
    await until(lambda: len(fails.received) == 4 and fails.aside)
    (aside,) = fails.aside
    assert aside.event.data.content == Text("1")
    assert isinstance(aside.error, ValueError)
    assert isinstance(await alice.send("bob", b"hello"), Acked)
    # The server still has this message only.
    await until(lambda: server.mail("alice") == 1)
    assert alice.generation == 1
    assert alice.status()["messages_set_aside"] == 1


@pytest.mark.parametrize("method", ["route", "interpret"])
async def test_message_that_the_protocol_cannot_interpret_is_set_aside(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(Demo, method)

    def broken(self: Demo, *args: Any) -> Any:
        if "very-secret" in str(args):
            raise RuntimeError("very-secret")
        return original(self, *args)

    monkeypatch.setattr(Demo, method, broken)
    fails = FailingHandler(at="")
    alice = await sessions.connect("alice", Demo(server), on_event=fails)
    for text in ("very-secret", "hello"):
        server.deliver("alice", Text(text))
    await until(lambda: fails.received and fails.aside)
    assert isinstance(fails.aside[0].error, RuntimeError)
    assert fails.aside[0].event.data is None
    await until(lambda: server.mail("alice") == 1)
    assert alice.generation == 1
    status = alice.status()
    assert (status["crashes"], status["messages_set_aside"], status["unhandled"]) == (0, 1, 1)


def test_new_link_redelivers_messages_that_were_set_aside() -> None:
    async def scenario(sim: Sim) -> None:
        server, fails = DemoServer(), FailingHandler(at="1")
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(server), on_event=fails)
            server.deliver("alice", Text("1"))
            await until(lambda: fails.aside)
            fails.at = ""
            await asyncio.sleep(299.0)
            assert fails.received == ["1"]
            # The pause before the next link is of 1 s at most.
            await asyncio.sleep(3.0)
            assert fails.received == ["1", "1"]
            assert alice.generation == 2
            assert server.mail("alice") == 0
            # Nothing is set aside now: the link stays.
            await asyncio.sleep(1000.0)
            assert alice.generation == 2

    run_one(scenario, 0, drift=False).result()


class SlowEndpoint:
    """An endpoint that takes 1.2 s for each dial, and refuses while `gone` is set."""

    def __init__(self, server: DemoServer) -> None:
        self._server = server
        self.gone = False

    async def dial(self, receiver: Receiver) -> Transport:
        await asyncio.sleep(1.2)
        if self.gone:
            raise ConnectionRefusedError("connection refused")
        return await self._server.memory.dial(receiver)


def test_message_that_is_never_handled_fails_no_send() -> None:
    async def scenario(sim: Sim) -> None:
        server, fails = DemoServer(), FailingHandler(at="1")
        server.delay = 0.3
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(SlowEndpoint(server)), on_event=fails)
            server.deliver("alice", Text("1"))
            while len(fails.aside) < 4:
                assert isinstance(await alice.send("bob", b"", outcome=True), Acked)
                await asyncio.sleep(0.1)
            assert fails.received == ["1"] * 4
            assert sim.now < 1000.0

    run_one(scenario, 0, drift=False).result()


def test_sends_in_flight_postpone_the_new_link_by_a_limit_only() -> None:
    async def scenario(sim: Sim) -> None:
        server, fails = DemoServer(), FailingHandler(at="1")
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(server), on_event=fails)
            server.deliver("alice", Text("1"))
            server.drop_acks = 1
            stuck = asyncio.create_task(alice.send("bob", b"", timeout=5000, outcome=True))
            await asyncio.sleep(590.0)
            assert alice.generation == 1
            await asyncio.sleep(20.0)
            assert alice.generation == 2
            assert (await stuck).id

    run_one(scenario, 0, drift=False).result()


def test_sends_that_wait_for_the_new_link_fail_if_it_cannot_be_made() -> None:
    async def scenario(sim: Sim) -> None:
        server, fails = DemoServer(), FailingHandler(at="1")
        endpoint = SlowEndpoint(server)
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(endpoint), on_event=fails)
            server.deliver("alice", Text("1"))
            endpoint.gone = True
            await asyncio.sleep(300.5)
            assert alice.state == "connecting/dialling"
            before = sim.now
            outcome = await alice.send("bob", b"", timeout=100, outcome=True)
            assert isinstance(outcome, NotSent)
            assert "connection refused" in str(outcome.reason)
            assert sim.now - before < 2.0

    run_one(scenario, 0, drift=False).result()
