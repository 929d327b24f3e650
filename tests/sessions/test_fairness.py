"""Every call and every event of a session yields to the event loop."""

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
    SessionError,
    Sessions,
    StepFailed,
    Submitted,
)
from moored.sessions.sending import _sends as sending
from moored.testing import Sim, run_one
from moored.testing.demo import MAX_FRAME, Demo, DemoServer

pytestmark = pytest.mark.every_loop


class IterationCounter:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._count()

    def _count(self) -> None:
        self.count += 1
        if not self._stopped:
            self._loop.call_soon(self._count)

    def stop(self) -> None:
        self._stopped = True


@pytest.fixture
async def iterations() -> AsyncIterator[IterationCounter]:
    counted = IterationCounter()
    yield counted
    counted.stop()


async def test_repeated_send_without_a_link_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    before = iterations.count
    for _ in range(50):
        assert isinstance(await alice.send("bob", b"x", outcome=True), NotSent)
    assert iterations.count - before >= 50


async def test_repeated_send_that_a_step_refuses_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    def refuse(outgoing: Outgoing, session: Any) -> Outgoing:
        raise StepFailed("no key")

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", refuse)])
    before = iterations.count
    for _ in range(50):
        assert isinstance(await alice.send("bob", b"x", outcome=True), NotSent)
        await alice.online()
    assert iterations.count - before >= 100


async def test_repeated_send_with_an_id_in_flight_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 1
    await alice.send("bob", b"x", id="1", wait=False)
    before = iterations.count
    for _ in range(50):
        with pytest.raises(SessionError, match="is in progress"):
            await alice.send("bob", b"x", id="1")
    assert iterations.count - before >= 50


async def test_sends_without_wait_yield_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    before = iterations.count
    for _ in range(50):
        await alice.send("bob", b"x", wait=False)
    assert iterations.count - before >= 50
    await until(lambda: alice.status()["acked"] == 50)


async def test_repeated_query_without_a_link_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    before = iterations.count
    for _ in range(50):
        with pytest.raises(NotConnected):
            await alice.query({"do": "echo", "value": 1})
    assert iterations.count - before >= 50


async def test_repeated_query_that_cannot_be_encoded_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    before = iterations.count
    for _ in range(50):
        with pytest.raises(QueryFailed):
            await alice.query({"do": "echo", "value": "x" * MAX_FRAME})
    assert iterations.count - before >= 50


async def test_online_waits_for_room_when_the_send_limit_is_reached(
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


async def test_plain_handler_flushes_its_acknowledgement_after_each_event(
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
    # The acknowledgement of a message is at most two iterations of the loop away from the server.
    late = [count - (30 - number) for number, count in enumerate(left)]
    assert max(late) <= 2, f"handled and not yet acknowledged, at each call: {late}"


async def test_loop_over_events_that_never_awaits_yields_to_the_loop(
    sessions: Sessions, server: DemoServer, iterations: IterationCounter
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    for _ in range(30):
        server.deliver("alice", b"x")
    await until(lambda: alice.status()["events_waiting"] >= 30)
    before, received = iterations.count, 0
    async for event in alice.events():
        received += event.type == "messages_upsert"
        if received == 30:
            break
    assert iterations.count - before >= 30


async def test_send_without_wait_returns_submitted(sessions: Sessions, server: DemoServer) -> None:
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


async def test_stop_with_drain_waits_for_sends_in_flight(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 0.05
    assert await _stop_while_sending(alice, 30.0) == ["Acked"] * 5


def test_stop_waits_no_longer_than_its_drain_timeout() -> None:
    async def scenario(sim: Sim) -> None:
        server = DemoServer()
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", Demo(server))
            server.drop_acks = 1000
            before = sim.now
            assert await _stop_while_sending(alice, 2.0) == ["Unknown"] * 5
            assert 2.0 <= sim.now - before < 3.0

    run_one(scenario, 0, drift=False).result()


async def test_draining_session_refuses_new_sends(sessions: Sessions, server: DemoServer) -> None:
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
