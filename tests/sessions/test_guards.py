"""Conditions that keep what is old, settled or closed from doing anything more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tests.sessions.support import LIMIT, until

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    Incoming,
    NotConnected,
    Notice,
    NotSent,
    Outgoing,
    Records,
    SessionError,
    Sessions,
    SessionStopped,
    StorageError,
    Text,
)
from moored.sessions.link import _link
from moored.sessions.link._closing_links import ClosingLinks
from moored.sessions.link._link import Link
from moored.sessions.storage._memory import MemoryStorage
from moored.testing import Sim, run_one
from moored.testing.demo import Demo, DemoServer


async def test_a_send_does_not_overtake_what_waits_in_the_outbox(sessions: Sessions) -> None:
    server = DemoServer(window=1)
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 30.0
    first = [asyncio.ensure_future(alice.send("bob", b"", id=id)) for id in ("1", "2")]
    await until(lambda: alice.status()["waiting"] == 1)
    link = alice._runtime.link
    assert link is not None
    # There is room again, and nobody has written yet what waits for it.
    link.window.resize(10)
    last = asyncio.ensure_future(alice.send("bob", b"", id="3"))
    await until(lambda: alice.status()["waiting"] == 2)
    link.flush()
    await until(lambda: len(server.received) == 3)
    assert [each.id for each in server.received] == ["1", "2", "3"]
    for id in ("1", "2", "3"):
        server.say("alice", {"k": "ack", "id": id})
    assert await asyncio.gather(*first, last) == [Acked("1"), Acked("2"), Acked("3")]


async def test_the_end_of_a_replaced_handler_does_not_let_two_events_be_handled_at_once(
    sessions: Sessions, server: DemoServer
) -> None:
    go_on, gate = asyncio.Event(), asyncio.Event()
    first: list[str] = []
    second: list[str] = []

    async def stubborn(event: Incoming) -> None:
        if event.type == "messages_upsert":
            first.append("begun")
            while not go_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await go_on.wait()
            first.append("done")

    async def next_one(event: Incoming) -> None:
        if event.type == "messages_upsert":
            second.append(event.data.content.text)
            await gate.wait()

    alice = await sessions.connect("alice", Demo(server), on_event=stubborn)
    server.deliver("alice", Text("1"))
    await until(lambda: first)
    alice.attach(next_one)
    server.deliver("alice", Text("2"))
    await until(lambda: second == ["2"])
    go_on.set()
    await until(lambda: first == ["begun", "done"])
    server.deliver("alice", Text("3"))
    await until(lambda: alice.status()["events_waiting"] == 1)
    assert second == ["2"]
    gate.set()
    await until(lambda: second == ["2", "3"])


# -- calls that come too early, too late or twice --------------------------------------------------


async def test_sessions_are_opened_once() -> None:
    async with Sessions() as sessions:
        with pytest.raises(SessionError, match="has been opened before"):
            await sessions.open()
    with pytest.raises(SessionError, match="has been opened before"):
        await sessions.open()
    for closed in (sessions, Sessions()):
        with pytest.raises(SessionError, match="is not open"):
            await closed.start("alice", Demo(DemoServer()))


async def test_a_profile_needs_a_name(sessions: Sessions, server: DemoServer) -> None:
    with pytest.raises(SessionError, match="must have a name"):
        await sessions.start("", Demo(server))


async def test_a_stopped_session_answers_no_question(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.stop()
    for question in ({"do": "echo"}, Notice({"do": "echo"})):
        with pytest.raises(NotConnected, match="stopped"):
            await alice.query(question)
    with pytest.raises(NotConnected, match="stopped"):
        alice.answer_login("1234")


async def test_nothing_is_told_to_a_server_before_the_login(sessions: Sessions) -> None:
    server = DemoServer(pairing=True)
    alice = await sessions.start("alice", Demo(server))
    await until(lambda: alice.state == "connecting/login")
    with pytest.raises(NotConnected, match="connecting/login"):
        await alice.query(Notice({"do": "presence", "state": "available"}))


async def test_a_login_is_answered_only_when_the_server_asks(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    with pytest.raises(NotConnected, match="no login waits"):
        alice.answer_login("1234")


async def test_stopping_an_old_session_leaves_the_new_one_of_its_profile(
    sessions: Sessions, server: DemoServer
) -> None:
    old = await sessions.connect("alice", Demo(server))
    await old.stop()
    new = await sessions.connect("alice", Demo(server))
    await old.stop()
    await sessions.stop(old)
    assert new.state == "online"


async def test_a_stop_that_comes_too_late_leaves_the_session_that_was_started_meanwhile(
    sessions: Sessions, server: DemoServer
) -> None:
    old = await sessions.connect("alice", Demo(server))
    await old.stop()
    new = await sessions.connect("alice", Demo(server))
    # It has waited for a handler, and another stop was faster.
    await sessions._end(old._runtime, "it was stopped", None, 0.0)
    assert new.state == "online"


async def test_a_function_for_credentials_must_return_bytes(
    sessions: Sessions, server: DemoServer
) -> None:
    wrong: Any = "a str"
    with pytest.raises(NotConnected, match="returned str, not bytes"):
        await sessions.connect("alice", Demo(server), credentials=lambda profile: wrong)


async def test_waiting_for_room_ends_with_its_timeout(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    monkeypatch.setattr("moored.sessions.sending._sends.LIMIT", 0)
    with pytest.raises(NotConnected, match=r"no room for a send within 0\.01 s"):
        await alice.online(0.01)
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="more than 0"):
            await alice.online(wrong)


async def test_questions_to_a_session_without_a_server_let_others_run(sessions: Sessions) -> None:
    alice = await sessions.start("alice", Demo(DemoServer()), offline=True)
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    await alice.query({"do": "echo"})
    assert turns


# -- steps -----------------------------------------------------------------------------------------


async def test_a_step_that_returns_nothing_keeps_the_send(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server), steps=[("look", lambda *_: None)])
    assert isinstance(await alice.send("bob", b""), Acked)


async def test_a_step_must_return_the_send(sessions: Sessions, server: DemoServer) -> None:
    wrong: Any = lambda *_: "a str"  # noqa: E731
    alice = await sessions.connect("alice", Demo(server), steps=[("wrong", wrong)])
    outcome = await alice.send("bob", b"", outcome=True)
    assert isinstance(outcome, NotSent)
    assert "must return the send, not str" in str(outcome.reason)


@pytest.mark.parametrize("change", [{"id": "other"}, {"recipient": "eve"}])
async def test_a_step_may_not_change_the_id_or_the_recipient(
    sessions: Sessions, server: DemoServer, change: dict[str, str]
) -> None:
    def step(outgoing: Outgoing, session: Any) -> Outgoing:
        names: dict[str, Any] = {"id": outgoing.id, "recipient": outgoing.recipient, **change}
        return Outgoing(content=outgoing.content, **names)

    alice = await sessions.connect("alice", Demo(server), steps=[("forge", step)])
    outcome = await alice.send("bob", b"", outcome=True)
    assert isinstance(outcome, NotSent)
    assert "must not change id or recipient" in str(outcome.reason)
    assert not server.received


async def test_a_step_that_times_out_by_itself_is_a_defect_of_the_step(
    sessions: Sessions, server: DemoServer
) -> None:
    async def step(outgoing: Outgoing, session: Any) -> None:
        await asyncio.sleep(0)
        raise TimeoutError("its own")

    alice = await sessions.connect("alice", Demo(server), steps=[("slow", step)])
    outcome = await alice.send("bob", b"", timeout=LIMIT, outcome=True)
    assert isinstance(outcome, NotSent)
    assert "its own" in str(outcome.reason)
    assert alice.status()["sender_crashes"] == 1


async def test_no_step_is_done_for_a_send_that_has_its_outcome(
    sessions: Sessions, server: DemoServer
) -> None:
    gate, done = asyncio.Event(), list[str]()

    async def step(outgoing: Outgoing, session: Any) -> None:
        done.append(outgoing.id)
        await gate.wait()

    alice = await sessions.connect("alice", Demo(server), steps=[("slow", step)])
    first = asyncio.create_task(alice.send("bob", b"", id="1"))
    await until(lambda: done)
    late = await alice.send("bob", b"", id="2", timeout=0.01, outcome=True)
    assert isinstance(late, NotSent)
    gate.set()
    assert isinstance(await first, Acked)
    assert isinstance(await alice.send("bob", b"", id="3"), Acked)
    assert done == ["1", "3"]


async def test_a_stop_in_the_middle_of_a_step_is_no_crash_of_its_sender(
    sessions: Sessions, server: DemoServer
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def step(outgoing: Outgoing, session: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    alice = await sessions.connect("alice", Demo(server), steps=[("for ever", step)])
    sending = asyncio.create_task(alice.send("bob", b"", outcome=True))
    await begun.wait()
    await alice.stop()
    assert isinstance(await sending, NotSent)
    assert alice.status()["sender_crashes"] == 0
    async with asyncio.timeout(LIMIT):
        await ended.wait()
    late = await alice.send("bob", b"", outcome=True)
    assert isinstance(late, NotSent)
    assert isinstance(late.reason, SessionStopped)


async def test_sends_whose_callers_have_gone_do_not_fill_the_outbox(server: DemoServer) -> None:
    server.refusing = True
    async with Sessions(backoff=Backoff(60.0, 60.0)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        for _ in range(100):
            sending = asyncio.create_task(alice.send("bob", b"", hold=True))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert alice.status()["sending"] == 0
        assert alice.status()["waiting"] <= 17


# -- what a link says ------------------------------------------------------------------------------


async def test_a_sign_of_life_counts_for_its_own_link_alone(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    old = alice._runtime.link
    assert old is not None
    assert old.keepalive is not None
    old.keepalive.heard_at = 0.0
    old.heard()
    assert old.keepalive.heard_at > 0.0
    await alice.disconnect()
    await alice.connect()
    link = alice._runtime.link
    assert link is not None
    assert link.keepalive is not None
    link.keepalive.heard_at = 0.0
    old.heard()
    assert link.keepalive.heard_at == 0.0
    quiet = await sessions.connect("quiet", Demo(server, keepalive=None))
    assert quiet._runtime.link is not None
    quiet._runtime.link.heard()


async def test_frames_that_the_protocol_routes_nowhere_or_makes_nothing_of(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def hears(event: Incoming) -> None:
        if event.type == "messages_upsert":
            heard.append(event.data.content.text)

    route, interpret = Demo.route, Demo.interpret
    monkeypatch.setattr(
        Demo, "route", lambda self, f: "unhandled" if "strange" in str(f) else route(self, f)
    )
    monkeypatch.setattr(
        Demo, "interpret", lambda self, t, f: None if "key" in str(f) else interpret(self, t, f)
    )
    alice = await sessions.connect("alice", Demo(server), on_event=hears)
    for text in ("strange", "key", "hello"):
        server.deliver("alice", Text(text))
    await until(lambda: heard)
    # What the protocol keeps for itself is acknowledged; what it does not know is not.
    await until(lambda: server.mail("alice") == 1)
    assert heard == ["hello"]
    assert alice.status()["unhandled"] == 1
    assert alice.status()["received"] == 2


async def test_a_server_that_takes_its_answers_may_ask_for_ever(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "MOST_ANSWERS", 100)
    alice = await sessions.connect("alice", Demo(server))
    for _ in range(50):
        server.say("alice", {"k": "ping"})
        for _ in range(4):
            await asyncio.sleep(0)
    assert isinstance(await alice.send("bob", b""), Acked)
    assert alice.generation == 1


@pytest.mark.parametrize("setting", [{"redelivers": "never"}, {"redelivery": None}])
def test_no_link_is_made_for_what_does_not_come_again(setting: dict[str, Any]) -> None:
    async def scenario(sim: Sim) -> None:
        def fails(event: Incoming) -> None:
            if event.type == "messages_upsert":
                raise ValueError("never")

        server = DemoServer()
        protocol = Demo(server)
        for name, value in setting.items():
            setattr(protocol, name, value)
        async with Sessions() as sessions:
            alice = await sessions.connect("alice", protocol, on_event=fails)
            server.deliver("alice", Text("1"))
            await asyncio.sleep(1000.0)
            assert alice.status()["messages_set_aside"] == 1
            assert (alice.generation, alice.state) == (1, "online")

    run_one(scenario, 0, drift=False).result()


class Ending:
    """A transport that is closed and not gone."""

    keeps_bounds = False

    def __init__(self, pending: int) -> None:
        self.pending = pending
        self.aborted = False

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


async def test_a_new_link_aborts_only_a_closed_one_that_still_sends() -> None:
    parting, transports = ClosingLinks(), (Ending(0), Ending(1))
    nobody: Any = None
    for number, transport in enumerate(transports):
        link = Link(nobody, nobody, number, nobody)
        link.transport = transport
        parting.closed(link)
    parting.abort()
    # The last words of the other one are on their way, and a reset could overtake them.
    assert [transport.aborted for transport in transports] == [False, True]


# -- records ---------------------------------------------------------------------------------------


async def test_a_transaction_whose_session_has_ended_meanwhile_writes_nothing() -> None:
    class Slow(MemoryStorage):
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            self.asked.set()
            await self.go_on.wait()
            return await super().get(profile, namespace, key)

    place = ("session", "bob")
    async with Slow() as storage:
        records = Records(storage, "alice")
        change = asyncio.create_task(records.update_many([place], lambda old: {place: b"late"}))
        await storage.asked.wait()
        await records.close(0.0)
        storage.go_on.set()
        with pytest.raises(StorageError, match="its session has ended"):
            await change
        assert await storage.get("alice", *place) is None


async def test_records_are_closed_after_the_changes_under_way() -> None:
    class Slow(MemoryStorage):
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            self.asked.set()
            await self.go_on.wait()
            await super().put(profile, namespace, key, value)

    async with Slow() as storage:
        records = Records(storage, "alice")
        change = asyncio.create_task(records.put("session", "bob", b"1"))
        await storage.asked.wait()
        asyncio.get_running_loop().call_later(0.05, storage.go_on.set)
        await records.close()
        assert await storage.get("alice", "session", "bob") == b"1"
        await change
