"""Sessions on a loop whose timers fire a little early, as those of uvloop do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.sessions.support import until

from moored.sessions import Incoming, Outgoing, Sessions, Unknown
from moored.testing.demo import Demo, DemoServer

#: More than the timers of any loop are early, in seconds.
EARLY = 0.005


@pytest.fixture(autouse=True)
async def early(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at

    def too_early(when: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        return call_at(when - EARLY, callback, *args, **more)

    monkeypatch.setattr(loop, "call_at", too_early)


async def test_send_times_out(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.drop_acks = 3
    sends = [alice.send("bob", b"", timeout=timeout, outcome=True) for timeout in (0.1, 0.02, 0.1)]
    for outcome in await asyncio.wait_for(asyncio.gather(*sends), 30):
        assert isinstance(outcome, Unknown)
        assert isinstance(outcome.reason, TimeoutError)


async def test_step_ends_with_the_timeout_of_its_send(
    sessions: Sessions, server: DemoServer
) -> None:
    async def hangs(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.get_running_loop().create_future()
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("hangs", hangs)])
    outcome = await asyncio.wait_for(alice.send("bob", b"", timeout=0.05, outcome=True), 30)
    assert isinstance(getattr(outcome, "reason", None), TimeoutError)


async def test_session_reconnects_after_its_pause(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.cut("alice")
    await until(lambda: alice.generation == 2)
    await alice.online(30)


async def test_silent_server_is_detected(sessions: Sessions, server: DemoServer) -> None:
    def hear_again(event: Incoming) -> None:
        if "no answer to a ping" in getattr(event.data, "reason", ""):
            server.deaf = False

    protocol = Demo(server, keepalive=0.05, patience=0.05)
    alice = await sessions.connect("alice", protocol, on_event=hear_again)
    server.deaf = True
    await until(lambda: not server.deaf)
    await alice.online(30)
