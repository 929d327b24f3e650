"""A session's interface besides its sends: arguments, types, the sandbox, logs, credentials."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any, assert_type

import pytest
from tests.sessions.storages import FullStorage
from tests.sessions.support import Broken, collect, until
from tests.stream_server import stream_server

from moored.kernel import Backoff
from moored.leases import LeaseLost, connect
from moored.sessions import (
    Acked,
    CloseClass,
    ConnectionUpdate,
    Feature,
    Incoming,
    NotConnected,
    Notice,
    NotSent,
    Outcome,
    Outgoing,
    Poll,
    QueryFailed,
    SenderCrash,
    SendNotSent,
    Session,
    Sessions,
    SessionStopped,
    SessionVia,
    StepFailed,
    Submitted,
    Tcp,
    Text,
    Unknown,
)
from moored.sessions.link._link import EVENTS
from moored.sessions.mqtt import Mqtt
from moored.sessions.sending import _senders
from moored.sessions.storage._memory import MemoryStorage
from moored.testing import session_sandbox
from moored.testing.demo import Demo, DemoServer
from moored.testing.demo._frames import encode

ROOT = Path(__file__).parents[2]


# -- timeouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [float("nan"), 0, -1.0, "3"])
async def test_invalid_timeout_is_refused_before_anything_is_written(
    sessions: Sessions, server: DemoServer, timeout: Any
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    wrong = (TypeError, ValueError)
    with pytest.raises(wrong, match="timeout"):
        await alice.send("bob", b"hello", timeout=timeout, outcome=True)
    with pytest.raises(wrong, match="timeout"):
        await alice.send("bob", b"hello", timeout=timeout, wait=False)
    with pytest.raises(wrong, match="timeout"):
        await alice.query({"do": "echo"}, timeout)
    with pytest.raises(TypeError, match="timeout"):
        await alice.query({"do": "echo"}, None)  # type: ignore[arg-type]
    await alice.query({"do": "echo"})  # answered after everything written before it
    assert server.received == []
    assert alice.status()["sending"] == 0
    # Later sends still time out.
    server.drop_acks = 1
    outcome = await alice.send("bob", b"hello", timeout=0.02, outcome=True)
    assert isinstance(outcome, Unknown)


# -- many sends to one recipient ------------------------------------------------------------


async def test_one_recipient_can_use_the_whole_send_limit_of_the_session(
    sessions: Sessions, server: DemoServer
) -> None:
    gate = asyncio.Event()

    async def wait(outgoing: Outgoing, session: Any) -> Outgoing:
        await gate.wait()
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("wait", wait)])
    sends = [asyncio.create_task(alice.send("bob", b"")) for _ in range(1200)]
    await until(lambda: alice.status()["sending"] == 1200)
    gate.set()
    assert {type(each) for each in await asyncio.gather(*sends)} == {Acked}


async def test_sends_above_the_limit_of_one_recipient_are_not_sent_and_the_error_says_what_to_do(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_senders, "LIMIT", 3)
    gate = asyncio.Event()

    async def wait(outgoing: Outgoing, session: Any) -> Outgoing:
        await gate.wait()
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("wait", wait)])
    first = asyncio.create_task(alice.send("very-secret", b""))
    await until(lambda: alice.status()["sending"] == 1)
    # They have timed out, but still queue behind the step of the first send.
    for _ in range(3):
        await alice.send("very-secret", b"", timeout=0.001, outcome=True)
    outcome = await alice.send("very-secret", b"", outcome=True)
    assert isinstance(outcome, NotSent)
    assert str(outcome.reason) == "3 sends to this recipient are queued: wait for outcomes first"
    gate.set()
    await first
    assert await alice.send("very-secret", b"")


# -- types --------------------------------------------------------------------------------------


async def _greet(session: Session) -> str:
    assert_type(await session.send_text("bob", "hello"), Acked)
    assert_type(await session.send_text("bob", "hello", timeout=5, wait=True), Acked)
    assert_type(await session.send_text("bob", "hello", outcome=True), Outcome)
    poll = Poll("tea?", ("yes",))
    assert_type(await session.send_poll("bob", poll, wait=False), Outcome | Submitted)
    return session.state


async def test_send_returns_what_its_overloads_declare(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.reject("eve", 463)
    outcome = await alice.send_text("eve", "hello", outcome=True)
    assert not isinstance(outcome, Acked)
    assert await _greet(alice) == "online"


async def test_session_via_is_accepted_wherever_a_session_is(
    sessions: Sessions, server: DemoServer
) -> None:
    via = sessions.via("alice")
    assert isinstance(via, SessionVia)
    assert isinstance(via, Session)
    for _ in range(2):
        await sessions.connect("alice", Demo(server))
        assert await _greet(via) == "online"
        await sessions.stop(via)
        assert sessions.whereis("alice") is None


# -- notices: queries without an answer -----------------------------------------------------------


class OnlyPresence(Demo):
    features = frozenset((Feature.PRESENCE, Feature.READ_MARKERS))


async def test_set_presence_waits_for_no_answer_and_needs_no_query_feature(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", OnlyPresence(server))
    bob = await sessions.connect("bob", Demo(server))
    events = collect(bob)
    await bob.query({"do": "watch", "who": "alice"})
    server.delay = 3600  # from here on, it answers nothing
    await asyncio.wait_for(alice.set_presence("writing", to="bob"), 30)
    await until(lambda: any(getattr(each.data, "state", "") == "writing" for each in events))
    server.delay = 0
    await alice.mark_read("bob", "1")  # this call does wait for an answer
    await alice.disconnect()
    with pytest.raises(NotConnected):
        await alice.set_presence("available")


async def test_notice_that_the_server_rejects_changes_nothing(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    assert await alice.query(Notice({"do": "nonsense"})) is None
    assert await alice.query({"do": "echo", "value": 1}) == 1
    assert alice.generation == 1


async def test_notices_to_a_server_that_does_not_read_fail_when_the_send_buffer_is_full(
    sessions: Sessions,
) -> None:
    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        welcome = {"k": "welcome", "resumed": False, "token": "", "window": None}
        writer.write(encode(welcome))
        await asyncio.Event().wait()

    async def flood() -> None:
        for _ in range(100_000):
            await alice.set_presence("x" * 4096)

    async with stream_server(never_reads) as port:
        alice = await sessions.connect("alice", Demo(Tcp("127.0.0.1", port)))
        with pytest.raises(QueryFailed, match="send buffer is full"):
            await flood()


# -- without a server ---------------------------------------------------------------------------


async def test_offline_session_reports_that_it_is_online() -> None:
    events: list[Incoming] = []
    async with session_sandbox(on_event=events.append) as sandbox:
        bot = sandbox.session
        assert bot.state == "online"
        await until(lambda: events)
        assert [each.data for each in events] == [ConnectionUpdate("online")]
        await sandbox.receive(Text("ping"))
        assert [each.type for each in events[1:]] == ["messages_upsert"]
    assert events[-1].data.state == "stopped"


async def test_offline_session_is_online_when_start_returns(
    server: DemoServer,
) -> None:
    class Silent(MemoryStorage):
        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            never: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
            return await never

    async with Sessions(storage=Silent()) as sessions:
        bot = await sessions.start("bot", Demo(server), offline=True)
        assert bot.state == "online"
        assert await bot.send("ann", b"hello", id="1") == Acked("1")
    assert server.accepted_links == 0


async def test_offline_session_can_be_disconnected_connected_and_stopped(
    server: DemoServer,
) -> None:
    async with session_sandbox(protocol=Demo(server)) as sandbox:
        bot = sandbox.session
        events = collect(bot)
        await bot.disconnect()
        assert bot.state == "offline/resting"
        with pytest.raises(SendNotSent, match="the user disconnected it"):
            await bot.send("ann", b"hello")
        with pytest.raises(NotConnected):
            await bot.query({"do": "echo"})
        with pytest.raises(NotConnected):
            await bot.set_presence("available")
        assert sandbox.sent == []
        await bot.connect()
        assert await bot.send("ann", b"hello")
        await bot.set_presence("available")
        await bot.stop()
        with pytest.raises(SendNotSent, match="is stopped"):
            await bot.send("ann", b"hello")
        with pytest.raises(SessionStopped):
            await bot.connect()
        states = [each.data.state for each in events]
        assert states == ["online", "offline/resting", "connecting/dialling", "online", "stopped"]
        assert len(sandbox.sent) == 1
        assert server.accepted_links == 0


async def test_held_send_of_an_offline_session_waits_for_connect() -> None:
    async with session_sandbox() as sandbox:
        bot = sandbox.session
        await bot.disconnect()
        connecting = asyncio.create_task(bot.connect())
        await asyncio.sleep(0)
        assert bot.state == "connecting/dialling"
        assert isinstance(await bot.send("ann", b"hello", outcome=True), NotSent)
        assert await bot.send("ann", b"hello", hold=True, id="1") == Acked("1")
        assert [each.id for each in sandbox.sent] == ["1"]
        await connecting


@pytest.mark.parametrize(
    ("protocol", "recipient", "content"),
    [
        (Mqtt("mqtt://nowhere"), "a/#", b"hello"),
        (Mqtt("mqtt://nowhere"), "ann", object()),
        (Mqtt("mqtt://nowhere"), "\0", b"hello"),
        (Demo(DemoServer()), "ann", object()),
        (Demo(DemoServer()), "ann", b"x" * 300_000),
    ],
)
async def test_offline_session_refuses_content_that_its_protocol_cannot_encode(
    protocol: Demo | Mqtt, recipient: str, content: Any
) -> None:
    async with session_sandbox(protocol=protocol) as sandbox:
        outcome = await sandbox.session.send(recipient, content, outcome=True)
        assert isinstance(outcome, NotSent)
        assert isinstance(outcome.reason, StepFailed)
        assert sandbox.sent == []
        assert await sandbox.session.send("ann", b"hello")
        assert await sandbox.session.send("ann", "words")


async def test_offline_session_runs_no_steps_and_checks_no_content_that_they_would_change(
    sessions: Sessions, server: DemoServer
) -> None:
    def as_json(outgoing: Outgoing, session: Any) -> Outgoing:
        raise AssertionError("no steps are run")

    steps = [("as_json", as_json)]
    bot = await sessions.connect("bot", Mqtt("mqtt://nowhere"), steps=steps, offline=True)
    assert await bot.send("ann", {"temperature": 20})


async def test_exception_in_the_sandbox_hook_fails_the_send() -> None:
    class Broken(Demo):
        def sandbox_extra(self, outgoing: Outgoing) -> Any:
            raise LookupError("a defect")

    async with session_sandbox(protocol=Broken(DemoServer())) as sandbox:
        with pytest.raises(SendNotSent, match="a defect"):
            await sandbox.session.send("ann", b"hello", timeout=30)


# -- senders that crash -------------------------------------------------------------------------


def _poison(outgoing: Outgoing, session: Any) -> Outgoing:
    raise LookupError(f"no key for {outgoing.recipient}")


async def test_sender_crash_is_an_event_and_its_log_line_omits_the_error_text(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await sessions.connect("alice", Demo(server), steps=[("poison", _poison)])
    events = collect(alice)
    await alice.send("very-secret", b"", wait=False)
    await until(lambda: [each.type for each in events].count("sender_crashed"))
    assert events[-1] == Incoming("sender_crashed", SenderCrash("LookupError", 1), "alice")
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "sessions/alice: a step of a send has crashed (LookupError), and 1 send to" in line
    assert "in _poison" in line  # the place in the code
    assert "very-secret" not in caplog.text
    for _ in range(100):
        await alice.send("very-secret", b"", outcome=True)
    lines = [each for each in caplog.records if "of a send has crashed" in each.getMessage()]
    assert len(lines) == 10 + len((16, 32, 64))


# -- the log ------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "moored.sessions" and each.levelname == level
    ]


async def test_lost_link_and_reconnect_are_logged(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alice = await sessions.connect("alice", Demo(server))
    await alice.send("very-secret-recipient", b"very-secret-content")
    server.cut("alice")
    await until(lambda: alice.generation == 2)
    await alice.online(30)
    found = lines(caplog, "INFO")
    assert found[0] == found[-1] == "sessions/alice is online"
    assert found[1].startswith("sessions/alice is connecting/waiting (transient): ")
    assert "; next attempt in " in found[1]
    assert len(found) == 3
    assert lines(caplog, "WARNING") == []
    assert "very-secret" not in caplog.text


async def test_equal_failed_attempts_share_one_log_line(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alice = await sessions.connect("alice", Demo(server))
    server.refusing = True
    server.cut("alice")
    await until(lambda: alice.generation > 20)
    server.refusing = False
    await alice.online(30)
    assert len(lines(caplog, "INFO")) <= 4


async def test_refused_account_is_logged_as_a_warning(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    server.revoke("alice")
    await until(lambda: alice.state == "offline/refused")
    (line,) = lines(caplog, "WARNING")
    assert line.startswith("sessions/alice is offline/refused (authentication): ")
    assert line.endswith("; call connect() to retry")


async def test_session_that_crashes_too_often_is_logged_as_a_warning(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alice = await sessions.start("alice", Broken(server))
    server.deliver("alice", Text("hello"))
    await until(lambda: sessions.whereis("alice") is None)
    assert alice.state == "stopped"
    (line,) = lines(caplog, "WARNING")
    why = "it has crashed too often: RuntimeError"
    assert line == f"sessions/alice has ended and will not be restarted: {why}"
    assert lines(caplog, "INFO")[-1] == f"sessions/alice is stopped: {why}"
    assert alice.status()["reason"] == why
    ours = [each for each in caplog.records if each.name == "moored.sessions"]
    assert not any("very-secret" in logging.Formatter().format(each) for each in ours)


async def test_deliberate_stop_is_not_logged_as_a_warning(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alice = await sessions.connect("alice", Demo(server))
    await alice.disconnect()
    await alice.stop()
    assert lines(caplog, "WARNING") == []
    assert lines(caplog, "INFO")[-1] == "sessions/alice is stopped: it was stopped"


async def test_close_reason_of_the_server_is_logged_as_one_short_line(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await sessions.connect("alice", Demo(server))
    reason = "no\nsessions/bob is online " + "x" * 900
    server.say("alice", {"k": "close", "class": "banned", "reason": reason})
    await until(lambda: lines(caplog, "WARNING"))
    (line,) = lines(caplog, "WARNING")
    assert "\n" not in line
    assert len(line) < 500


async def test_session_crash_is_recorded_without_the_error_text(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    events = collect(alice)
    assert alice._runtime.connection is not None
    alice._runtime.connection.crash(RuntimeError("very-secret"))
    await until(lambda: "session_crashed" in [each.type for each in events])
    crash = ConnectionUpdate(
        "connecting/waiting", CloseClass.TRANSIENT, "the session has crashed: RuntimeError"
    )
    await until(lambda: crash in [each.data for each in events])
    assert "very-secret" not in str(alice.status())


async def test_warnings_about_events_name_the_account(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: Incoming) -> None:
        if event.type == "messages_upsert":
            raise LookupError

    alice = await sessions.connect("alice", Demo(server), on_event=fails)
    server.say("alice", {"k": "?"})
    server.deliver("alice", Text("hello"))
    await until(lambda: alice.status()["handler_failures"])
    unhandled, failed = lines(caplog, "WARNING")
    assert unhandled.startswith("sessions/alice: the protocol does not handle a frame")
    assert failed.startswith("the event handler of 'alice' failed")


# -- credentials --------------------------------------------------------------------------------


async def pair(sessions: Sessions, server: DemoServer, profile: str) -> None:
    session = await sessions.start(profile, Demo(server))
    events = collect(session)
    await until(lambda: any(each.type == "login" for each in events))
    server.confirm(profile)
    await session.online(30)


async def test_credentials_in_a_volatile_storage_are_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = DemoServer(pairing=True)
    async with Sessions(backoff=Backoff(0.01, 0.05)) as sessions:
        await pair(sessions, server, "alice")
        await pair(sessions, server, "bob")
    (line,) = lines(caplog, "WARNING")
    assert line.startswith("sessions/alice was issued credentials, which the storage loses")


async def test_credentials_in_a_durable_storage_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = DemoServer(pairing=True)
    async with Sessions(storage=tmp_path / "a.db", backoff=Backoff(0.01, 0.05)) as sessions:
        await pair(sessions, server, "alice")
    assert lines(caplog, "WARNING") == []


@pytest.mark.parametrize("full", [True, False], ids=["not stored", "stored"])
async def test_new_lease_reloads_credentials_only_if_they_were_stored(full: bool) -> None:
    server, storage = DemoServer(pairing=True), FullStorage()
    storage.full = full
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases, storage=storage, backoff=Backoff(0.01, 0.05)) as sessions,
    ):
        await pair(sessions, server, "alice")
        alice = sessions.whereis("alice")
        assert alice is not None
        await until(lambda: alice._runtime.credentials.saving is None)
        storage.full = False
        if not full:
            # Another process has owned the account and stored other credentials.
            await storage.put("alice", "creds", "creds", server.add("alice"))
        lease = alice._runtime.lease
        assert lease is not None
        await leases.revoke(lease.id, lease.key)
        with pytest.raises(LeaseLost):
            await lease.renew()
        await until(lambda: alice.generation > 2 and alice.state != "connecting/dialling")
        await until(lambda: alice.state in ("online", "connecting/login", "offline/refused"))
        assert alice.state == "online"


# -- the docs -----------------------------------------------------------------------------------


def test_every_event_is_in_the_docs() -> None:
    found = {"messages_upsert", *EVENTS.values()}
    for path in (ROOT / "src/moored/sessions").rglob("_*.py"):
        found.update(re.findall(r'(?:emit|Incoming)\(\s*"(\w+)"', path.read_text()))
    assert {"connection_update", "events_dropped", "sender_crashed"} <= found
    page = (ROOT / "docs/topics/sessions.md").read_text()
    listed = page.partition("Frames become events:")[2].partition("Users never see")[0]
    assert set(re.findall(r"`(\w+_\w+|login)`", listed)) == found
    for name in found:
        assert f"`{name}`" in (Incoming.__doc__ or "")
