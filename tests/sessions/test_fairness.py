"""No call and no handler of a session keeps the event loop for itself, whatever it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.sessions.support import until

from moored.sessions import (
    Acked,
    Incoming,
    NotConnected,
    NotSent,
    Outgoing,
    QueryFailed,
    Session,
    Sessions,
    StepFailed,
    Submitted,
)
from moored.sessions.sending import _sends as sending
from moored.testing import Sim, run_one
from moored.testing.demo import MAX_FRAME, Demo, DemoServer

pytestmark = pytest.mark.every_loop


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._turn()

    def _turn(self) -> None:
        self.count += 1
        if not self._over:
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._over = True


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    counted = Turns()
    yield counted
    counted.stop()


async def test_retrying_a_send_without_a_link_lets_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    before = turns.count
    for _ in range(50):
        assert isinstance(await alice.send("bob", b"x", outcome=True), NotSent)
    assert turns.count - before >= 50


async def test_retrying_a_send_that_a_step_refuses_lets_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    def refuse(outgoing: Outgoing, session: Any) -> Outgoing:
        raise StepFailed("no key")

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", refuse)])
    before = turns.count
    for _ in range(50):
        assert isinstance(await alice.send("bob", b"x", outcome=True), NotSent)
        await alice.online()
    assert turns.count - before >= 100


async def test_sends_that_nobody_waits_for_let_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    before = turns.count
    for _ in range(50):
        await alice.send("bob", b"x", wait=False)
    assert turns.count - before >= 50
    await until(lambda: alice.status()["acked"] == 50)


async def test_retrying_a_query_without_a_link_lets_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    before = turns.count
    for _ in range(50):
        with pytest.raises(NotConnected):
            await alice.query({"do": "echo", "value": 1})
    assert turns.count - before >= 50


async def test_retrying_a_query_that_cannot_be_written_lets_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    before = turns.count
    for _ in range(50):
        with pytest.raises(QueryFailed):
            await alice.query({"do": "echo", "value": "x" * MAX_FRAME})
    assert turns.count - before >= 50


async def test_online_waits_for_room_when_too_many_sends_are_under_way(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LIMIT", 3)
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 0.05
    first = [asyncio.ensure_future(alice.send("bob", b"x")) for _ in range(3)]
    await asyncio.sleep(0)
    assert isinstance(await alice.send("bob", b"y", outcome=True), NotSent)
    await alice.online(30)
    # online() returned when there was room for a send, and not before.
    assert isinstance(await alice.send("bob", b"y", outcome=True), Acked)
    await asyncio.gather(*first)


async def test_a_plain_handler_lets_its_acknowledgements_out_after_each_event(
    sessions: Sessions, server: DemoServer
) -> None:
    left: list[int] = []

    def handle(event: Incoming) -> None:
        if event.type == "messages_upsert":
            left.append(server.mail("alice"))

    alice = await sessions.connect("alice", Demo(server), on_event=None)
    for _ in range(30):
        server.deliver("alice", b"x")
    await until(lambda: alice.status()["events_waiting"] >= 30)
    alice.attach(handle)
    await until(lambda: server.mail("alice") == 0)
    # The acknowledgement of a message is at most two turns of the loop away from the server.
    late = [count - (30 - number) for number, count in enumerate(left)]
    assert max(late) <= 2, f"so many were handled and unacknowledged, at each call: {late}"


async def test_a_loop_over_events_that_never_waits_lets_others_run(
    sessions: Sessions, server: DemoServer, turns: Turns
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    for _ in range(30):
        server.deliver("alice", b"x")
    await until(lambda: alice.status()["events_waiting"] >= 30)
    before, heard = turns.count, 0
    async for event in alice.events():
        heard += event.type == "messages_upsert"
        if heard == 30:
            break
    assert turns.count - before >= 30


async def test_a_send_that_is_not_waited_for_has_a_type_of_its_own(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.refusing = True
    server.cut("alice")
    await until(lambda: alice.state == "connecting/waiting")
    held = await alice.send("bob", b"x", id="1", wait=False, hold=True)
    assert held == Submitted("1")
    assert isinstance(await alice.send("bob", b"x", wait=False), NotSent)
    assert not server.received


async def _stop_while_sending(session: Session, drain: float) -> list[str]:
    sends = [asyncio.ensure_future(session.send("bob", b"x", outcome=True)) for _ in range(5)]
    await asyncio.sleep(0)
    await session.stop(drain=drain)
    return [type(await each).__name__ for each in sends]


async def test_a_stop_waits_for_the_sends_under_way(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 0.05
    assert await _stop_while_sending(alice, 30.0) == ["Acked"] * 5


def test_a_stop_waits_no_longer_than_it_was_told_to() -> None:
    async def scenario(sim: Sim) -> None:
        server = DemoServer()
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(server))
            server.drop_acks = 1000
            before = sim.now
            assert await _stop_while_sending(alice, 2.0) == ["Unknown"] * 5
            assert 2.0 <= sim.now - before < 3.0

    run_one(scenario, 0, drift=False).result()


async def test_a_session_that_drains_takes_no_more_sends(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    under_way = asyncio.ensure_future(alice.send("bob", b"x", id="1", outcome=True))
    await until(lambda: server.received)
    stopping = asyncio.ensure_future(sessions.close(drain=30.0))
    await until(lambda: alice._runtime.sends.draining)
    late = await alice.send("bob", b"y", outcome=True)
    assert isinstance(late, NotSent)
    assert "is being stopped" in str(late.reason)
    server.say("alice", {"k": "ack", "id": "1"})
    await stopping
    assert isinstance(await under_way, Acked)
