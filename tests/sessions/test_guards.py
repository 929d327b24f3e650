"""Old links, settled sends and closed objects have no further effect."""

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


async def test_send_does_not_overtake_sends_in_the_outbox(sessions: Sessions) -> None:
    server = DemoServer(window=1)
    alice = await sessions.connect("alice", Demo(server))
    server.delay = 30.0
    first = [asyncio.ensure_future(alice.send("bob", b"", id=id)) for id in ("1", "2")]
    await until(lambda: alice.status()["waiting"] == 1)
    link = alice._runtime.link
    assert link is not None
    # The window has room again, and the outbox has not been flushed yet.
    link.window.resize(10)
    last = asyncio.ensure_future(alice.send("bob", b"", id="3"))
    await until(lambda: alice.status()["waiting"] == 2)
    link.flush()
    await until(lambda: len(server.received) == 3)
    assert [each.id for each in server.received] == ["1", "2", "3"]
    for id in ("1", "2", "3"):
        server.say("alice", {"k": "ack", "id": id})
    assert await asyncio.gather(*first, last) == [Acked("1"), Acked("2"), Acked("3")]


async def test_end_of_a_replaced_handler_does_not_start_a_second_event(
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


# -- calls that are too early, too late or repeated -----------------------------------------------


async def test_sessions_can_be_opened_once() -> None:
    async with Sessions() as sessions:
        with pytest.raises(SessionError, match="was opened before"):
            await sessions.open()
    with pytest.raises(SessionError, match="was opened before"):
        await sessions.open()
    for closed in (sessions, Sessions()):
        with pytest.raises(SessionError, match="is not open"):
            await closed.start("alice", Demo(DemoServer()))


async def test_empty_profile_is_refused(sessions: Sessions, server: DemoServer) -> None:
    with pytest.raises(SessionError, match="must not be empty"):
        await sessions.start("", Demo(server))


async def test_stopped_session_refuses_queries_and_login_answers(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    await alice.stop()
    for query in ({"do": "echo"}, Notice({"do": "echo"})):
        with pytest.raises(NotConnected, match="stopped"):
            await alice.query(query)
    with pytest.raises(NotConnected, match="stopped"):
        alice.answer_login("1234")


async def test_query_or_notice_before_the_login_is_refused(sessions: Sessions) -> None:
    server = DemoServer(pairing=True)
    alice = await sessions.start("alice", Demo(server))
    await until(lambda: alice.state == "connecting/login")
    for query in ({"do": "echo"}, Notice({"do": "presence", "state": "available"})):
        with pytest.raises(NotConnected, match="connecting/login"):
            await alice.query(query)
    assert (alice.state, server.protocol_errors) == ("connecting/login", 0)


async def test_answer_login_is_refused_unless_a_login_is_pending(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    with pytest.raises(NotConnected, match="has not requested a login step"):
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


async def test_late_stop_leaves_a_session_that_started_meanwhile(
    sessions: Sessions, server: DemoServer
) -> None:
    old = await sessions.connect("alice", Demo(server))
    await old.stop()
    new = await sessions.connect("alice", Demo(server))
    # As if this stop had waited for a handler while another stop finished.
    await sessions._end(old._runtime, "it was stopped", 0.0)
    assert new.state == "online"


async def test_credentials_function_must_return_bytes(
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
    with pytest.raises(NotConnected, match=r"too many sends are in progress, for 0\.01 s"):
        await alice.online(0.01)
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="more than 0"):
            await alice.online(wrong)


async def test_query_of_an_offline_session_yields_to_the_loop(sessions: Sessions) -> None:
    alice = await sessions.start("alice", Demo(DemoServer()), offline=True)
    iterations: list[None] = []
    asyncio.get_running_loop().call_soon(iterations.append, None)
    await alice.query({"do": "echo"})
    assert iterations


# -- steps -----------------------------------------------------------------------------------------


async def test_step_that_returns_none_keeps_the_send(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server), steps=[("look", lambda *_: None)])
    assert isinstance(await alice.send("bob", b""), Acked)


async def test_step_that_returns_another_type_fails_the_send(
    sessions: Sessions, server: DemoServer
) -> None:
    wrong: Any = lambda *_: "a str"  # noqa: E731
    alice = await sessions.connect("alice", Demo(server), steps=[("wrong", wrong)])
    outcome = await alice.send("bob", b"", outcome=True)
    assert isinstance(outcome, NotSent)
    assert "must return the send, not str" in str(outcome.reason)


@pytest.mark.parametrize("change", [{"id": "other"}, {"recipient": "eve"}])
async def test_step_that_changes_the_id_or_recipient_fails_the_send(
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


async def test_timeout_error_raised_by_a_step_is_a_sender_crash(
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


async def test_settled_send_skips_its_steps(sessions: Sessions, server: DemoServer) -> None:
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


async def test_stop_during_a_step_is_not_a_sender_crash(
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


async def test_cancelled_sends_do_not_fill_the_outbox(server: DemoServer) -> None:
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


# -- events of a link ------------------------------------------------------------------------------


async def test_sign_of_life_counts_only_for_its_own_link(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    old = alice._runtime.link
    assert old is not None
    assert old.keepalive is not None
    old.keepalive.received_at = 0.0
    old.heard()
    assert old.keepalive.received_at > 0.0
    await alice.disconnect()
    await alice.connect()
    link = alice._runtime.link
    assert link is not None
    assert link.keepalive is not None
    link.keepalive.received_at = 0.0
    old.heard()
    assert link.keepalive.received_at == 0.0
    quiet = await sessions.connect("quiet", Demo(server, keepalive=None))
    assert quiet._runtime.link is not None
    quiet._runtime.link.heard()


async def test_unrouted_frames_stay_unacknowledged_and_internal_ones_are_acknowledged(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def collect(event: Incoming) -> None:
        if event.type == "messages_upsert":
            texts.append(event.data.content.text)

    route, interpret = Demo.route, Demo.interpret
    monkeypatch.setattr(
        Demo, "route", lambda self, f: "unhandled" if "strange" in str(f) else route(self, f)
    )
    monkeypatch.setattr(
        Demo, "interpret", lambda self, t, f: None if "key" in str(f) else interpret(self, t, f)
    )
    alice = await sessions.connect("alice", Demo(server), on_event=collect)
    for text in ("strange", "key", "hello"):
        server.deliver("alice", Text(text))
    await until(lambda: texts)
    # A frame that the protocol consumes is acknowledged; an unknown frame is not.
    await until(lambda: server.mail("alice") == 1)
    assert texts == ["hello"]
    assert alice.status()["unhandled"] == 1
    assert alice.status()["received"] == 2


async def test_answered_pings_do_not_count_against_the_limit_of_unsent_answers(
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
def test_no_link_is_made_for_messages_that_are_not_redelivered(setting: dict[str, Any]) -> None:
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


class ClosedTransport:
    """A transport that is closed, and has not ended yet."""

    keeps_bounds = False

    def __init__(self, pending: int) -> None:
        self.pending = pending
        self.aborted = False

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


async def test_new_link_aborts_only_closed_links_with_unsent_data() -> None:
    closing_links, transports = ClosingLinks(), (ClosedTransport(0), ClosedTransport(1))
    unused: Any = None
    for number, transport in enumerate(transports):
        link = Link(unused, unused, number, unused)
        link.transport = transport
        closing_links.closed(link)
    closing_links.abort()
    # The last bytes of the other one are in the kernel, and a reset could discard them.
    assert [transport.aborted for transport in transports] == [False, True]


# -- records ---------------------------------------------------------------------------------------


async def test_transaction_whose_session_has_ended_writes_nothing() -> None:
    class BlockingStorage(MemoryStorage):
        called, go_on = asyncio.Event(), asyncio.Event()

        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            self.called.set()
            await self.go_on.wait()
            return await super().get(profile, namespace, key)

    record = ("session", "bob")
    async with BlockingStorage() as storage:
        records = Records(storage, "alice")
        change = asyncio.create_task(records.update_many([record], lambda old: {record: b"late"}))
        await storage.called.wait()
        await records.close(0.0)
        storage.go_on.set()
        with pytest.raises(StorageError, match="the session has ended"):
            await change
        assert await storage.get("alice", *record) is None


async def test_closing_records_waits_for_updates_in_progress() -> None:
    class BlockingStorage(MemoryStorage):
        called, go_on = asyncio.Event(), asyncio.Event()

        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            self.called.set()
            await self.go_on.wait()
            await super().put(profile, namespace, key, value)

    async with BlockingStorage() as storage:
        records = Records(storage, "alice")
        change = asyncio.create_task(records.put("session", "bob", b"1"))
        await storage.called.wait()
        asyncio.get_running_loop().call_later(0.05, storage.go_on.set)
        await records.close()
        assert await storage.get("alice", "session", "bob") == b"1"
        await change
