"""A failing step, handler, storage or server affects only its own send, event or session."""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.leases import connect
from moored.sessions import (
    Acked,
    AlreadyRunning,
    Incoming,
    NotSent,
    Outgoing,
    SenderCrashed,
    SendNotSent,
    SessionError,
    Sessions,
    SessionStopped,
    StepFailed,
    StorageError,
    Text,
)
from moored.sessions.events._event_queue import EventQueue
from moored.sessions.events._sink import Sink
from moored.sessions.mqtt import Message, Mqtt
from moored.sessions.mqtt._dialogue import MqttDialogue
from moored.sessions.sending._acks import SLACK, AckTable, Parked
from moored.sessions.storage._memory import MemoryStorage
from moored.testing import session_sandbox
from moored.testing.demo import Demo, DemoServer

#: Longer than any test: a wait that needs it was not ended by its cause.
LONG = 300.0


# -- steps -----------------------------------------------------------------------------------------


async def await_cancelled_task() -> None:
    """Raise CancelledError, as a wait for a cancelled task does."""
    other = asyncio.create_task(asyncio.sleep(LONG))
    other.cancel()
    await other


async def test_cancellation_inside_a_step_settles_the_sends_of_its_recipient(
    sessions: Sessions, server: DemoServer
) -> None:
    async def step(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.sleep(0)
        if outgoing.content == b"bad":
            await await_cancelled_task()
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", step)])
    async with asyncio.timeout(30):
        first, second, other = await asyncio.gather(
            alice.send("bob", b"bad", outcome=True, timeout=LONG),
            alice.send("bob", b"good", outcome=True, timeout=LONG),
            alice.send("carol", b"good", outcome=True, timeout=LONG),
        )
        assert isinstance(first, NotSent)
        assert isinstance(first.reason, SenderCrashed)
        assert isinstance(second, NotSent)
        assert isinstance(other, Acked)
        assert isinstance(await alice.send("bob", b"good"), Acked)


async def test_plain_step_that_raises_cancelled_error_fails_its_send(
    sessions: Sessions, server: DemoServer
) -> None:
    def step(outgoing: Outgoing, session: Any) -> Outgoing:
        raise asyncio.CancelledError

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", step)])
    assert isinstance(await alice.send("bob", b"hello", outcome=True), NotSent)
    assert alice.status()["sending"] == 0


async def test_step_that_never_returns_ends_with_the_timeout_of_its_send(
    sessions: Sessions, server: DemoServer
) -> None:
    async def step(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.sleep(LONG if outgoing.content == b"bad" else 0)
        return outgoing

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", step)])
    first = asyncio.create_task(alice.send("bob", b"bad", outcome=True, timeout=0.05))
    second = asyncio.create_task(alice.send("bob", b"good", timeout=LONG))
    found = await first
    assert isinstance(found, NotSent)
    assert isinstance(found.reason, TimeoutError)
    async with asyncio.timeout(30):
        assert isinstance(await second, Acked)


async def test_recorder_omits_the_error_text_of_a_step(
    sessions: Sessions, server: DemoServer
) -> None:
    def raises(outgoing: Outgoing, session: Any) -> Outgoing:
        raise KeyError(outgoing.recipient)

    def returns(outgoing: Outgoing, session: Any) -> Any:
        return outgoing.content

    for name, step in (("alice", raises), ("bert", returns)):
        session = await sessions.connect(name, Demo(server), steps=[("encrypt", step)])
        assert isinstance(await session.send("bob-5551", b"attack", outcome=True), NotSent)
    recorder = sessions.recorder
    texts = "".join(f"{each}{recorder.explain(each)}" for each in recorder.components())
    assert "a step of a send has crashed (KeyError), and 1 send to that recipient failed" in texts
    assert "bob-5551" not in texts
    assert "attack" not in texts


# -- sends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipient", "id"), [(None, None), (5, None), (["bob"], None), ("bob", 5)]
)
async def test_invalid_recipient_or_id_is_refused_and_leaves_nothing_behind(
    sessions: Sessions, server: DemoServer, recipient: Any, id: Any
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    with pytest.raises(TypeError, match="must be a str"):
        await alice.send(recipient, b"hello", id=id)
    assert alice.status()["sending"] == 0


async def test_exception_in_the_protocols_write_fails_the_send_immediately(
    sessions: Sessions, server: DemoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moored.testing.demo._protocol import DemoDialogue

    real = DemoDialogue.write

    def write(self: DemoDialogue, outgoing: Outgoing) -> bytes:
        if outgoing.content == b"bad":
            raise LookupError("a defect")
        return real(self, outgoing)

    monkeypatch.setattr(DemoDialogue, "write", write)
    protocol = Demo(server)
    protocol.steps = ()
    alice = await sessions.connect("alice", protocol)
    found = await alice.send("bob", b"bad", outcome=True, timeout=LONG)
    assert isinstance(found, NotSent)
    assert isinstance(found.reason, SenderCrashed)
    assert (alice.state, alice.status()["sending"]) == ("online", 0)


def test_mqtt_message_that_cannot_be_encoded_fails_its_send_only() -> None:
    message = Message(b"", user_properties=(("a", 5),))  # type: ignore[arg-type]
    protocol = Mqtt("mqtt://127.0.0.1", subscribe=())
    dialogue = protocol.begin("alice", None, protocol.remember())
    assert isinstance(dialogue, MqttDialogue)
    list(dialogue.feed(bytes.fromhex("2003000000")))
    with pytest.raises(StepFailed, match="it cannot be sent over MQTT"):
        dialogue.write(Outgoing("1", "bob", message))


async def test_send_repeated_with_its_id_takes_a_second_place_in_the_window(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    link = alice._runtime.link
    assert link is not None
    link.window.resize(2)
    server.drop_acks = 1
    assert not isinstance(await alice.send("bob", b"1", id="x", timeout=0.01, outcome=True), Acked)
    server.delay = 0.05
    again = asyncio.create_task(alice.send("bob", b"1", id="x"))
    third = asyncio.create_task(alice.send("bob", b"2"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert alice.status()["waiting"] == 1
    assert isinstance(await again, Acked)
    assert isinstance(await third, Acked)


def test_settled_sends_behind_an_open_one_are_cleaned_up() -> None:
    table = AckTable(lambda parked, outcome: None)
    table.park(Parked(Outgoing("first", "bob", b""), -1.0, -1.0))
    for number in range(10 * SLACK):
        parked = Parked(Outgoing(str(number), "bob", b""), float(number), float(number))
        table.park(parked)
        table.failed(parked, "done")
    assert len(table._deadlines) <= SLACK + 4
    assert table.next_deadline() == -1.0


# -- events ----------------------------------------------------------------------------------------


async def test_handler_can_stop_its_own_session(sessions: Sessions, server: DemoServer) -> None:
    stopped = asyncio.Event()

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            await sessions.stop("alice")
            stopped.set()

    await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", b"quit", sender="bob")
    # The stop must not wait for the handler that called it.
    async with asyncio.timeout(30):
        await stopped.wait()
    assert sessions.whereis("alice") is None


async def test_cancellation_inside_a_handler_fails_one_message_only(
    sessions: Sessions, server: DemoServer
) -> None:
    seen = []

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            seen.append(event.data.content)
            if seen == [b"1"]:
                await await_cancelled_task()

    alice = await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", b"1", sender="bob")
    server.deliver("alice", b"2", sender="bob")
    await until(lambda: seen[:2] == [b"1", b"2"])
    assert alice.status()["handler_failures"] == 1
    assert alice.status()["events_waiting"] == 0


async def test_handler_that_attaches_another_receives_nothing_more() -> None:
    sink = Sink(EventQueue("alice"))
    one, two = [], []

    def first(event: Incoming) -> None:
        one.append(event.data)
        sink.attach(lambda event: two.append(event.data))

    for number in range(5):
        sink.put(Incoming("number", number, "alice"))
    sink.attach(first)
    await until(lambda: len(one) + len(two) == 5)
    assert (one, two) == ([0], [1, 2, 3, 4])


async def test_overflow_drops_plain_events_before_messages_with_acknowledgement() -> None:
    sink = Sink(EventQueue("alice", 3))
    handled: list[bool] = []
    for number in range(5):
        sink.put(Incoming("noise", number, "alice"))
    messages = [Incoming("message", number, "alice") for number in range(4)]
    assert [sink.put(each, handled.append) for each in messages] == [True, True, True, False]
    assert (len(sink.queue), sink.queue.dropped) == (6, 3)
    taken: list[Any] = []
    sink.attach(lambda event: taken.append(event.type))
    await until(lambda: not sink.queue)
    assert taken == ["events_dropped", *["noise"] * 3, *["message"] * 3]
    assert handled == [True] * 3
    assert sink.queue.owed == 0


# -- storage, lifecycle and links ------------------------------------------------------------


class FaultyStorage(MemoryStorage):
    """A storage whose reads fail or hang, as `fault` says."""

    fault = ""

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        match self.fault:
            case "storage error":
                raise StorageError("the disk is away")
            case "other error":
                raise LookupError("an error of a library below")
            case "hang":
                await asyncio.sleep(LONG)
        return await super().get(profile, namespace, key)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("storage error", "disk is away"), ("other error", "LookupError"), ("hang", "Timeout")],
)
async def test_session_reconnects_when_its_storage_works_again(
    server: DemoServer, fault: str, reason: str
) -> None:
    storage = FaultyStorage()
    async with Sessions(
        storage=storage, backoff=Backoff(0.01, 0.05), connect_timeout=0.5
    ) as sessions:
        alice = await sessions.connect("alice", Demo(server))
        storage.fault = fault
        server.cut("alice")
        await until(lambda: reason in alice.status()["reason"])
        storage.fault = ""
        await alice.online(30)
        assert alice.status()["crashes"] == 0


class SlowStorage(MemoryStorage):
    """A storage that takes 10 ms for each operation."""

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        await asyncio.sleep(0.01)
        return await super().get(profile, namespace, key)

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        await asyncio.sleep(0.01)
        await super().put(profile, namespace, key, value)


def increment(old: bytes | None) -> bytes:
    return b"%d" % (int(old or b"0") + 1)


async def test_no_record_update_is_lost_between_two_sessions_of_a_profile(
    server: DemoServer,
) -> None:
    async with Sessions(storage=SlowStorage()) as sessions:
        first = await sessions.connect("alice", Demo(server))
        changes = [first.records.update("session", "bob", increment) for _ in range(5)]
        under_way = [asyncio.create_task(change) for change in changes]
        await asyncio.sleep(0)
        await first.stop()
        second = await sessions.connect("alice", Demo(server))
        await asyncio.gather(*under_way)
        assert await second.records.update("session", "bob", increment) == b"6"
        with pytest.raises(StorageError, match="the session has ended"):
            await first.records.update("session", "bob", increment)


async def test_failed_open_leaves_the_storage_unlocked(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="unknown scheme nonsense"):
        async with Sessions(storage=f"files:{tmp_path}", leases="nonsense://"):
            pass
    async with Sessions(storage=f"files:{tmp_path}") as sessions:
        assert len(sessions) == 0


async def test_log_lines_about_unhandled_frames_are_limited(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    for _ in range(600):
        server.say("alice", {"k": "?"})
    await until(lambda: alice.status()["unhandled"] == 600)
    ours = [each for each in caplog.records if each.name == "moored.sessions"]
    ours = [each for each in ours if each.levelno == logging.WARNING]
    assert len(ours) == 100 + len((128, 256, 512))


async def test_earlier_link_loss_is_not_the_reason_of_a_later_disconnect_or_stop(
    sessions: Sessions, server: DemoServer
) -> None:
    updates = []
    alice = await sessions.connect("alice", Demo(server), on_event=lambda e: updates.append(e.data))
    server.cut("alice")
    await until(lambda: alice.generation == 2)
    await alice.online(30)
    await alice.disconnect()
    with pytest.raises(SendNotSent, match="is offline/resting: the user disconnected it"):
        await alice.send("bob", b"hello")
    await alice.stop()
    assert [(each.state, each.kind) for each in updates[-2:]] == [
        ("offline/resting", None),
        ("stopped", None),
    ]
    with pytest.raises(SessionStopped, match="is stopped: it was stopped"):
        await alice.connect()


async def test_offline_session_never_dials_even_after_a_crash(
    sessions: Sessions, server: DemoServer
) -> None:
    bot = await sessions.connect("bot", Demo(server), offline=True)
    await bot.disconnect()
    await bot.connect()
    assert bot._runtime.connection is not None
    bot._runtime.connection.crash(RuntimeError("a defect"))
    await until(lambda: bot.status()["crashes"] == 1)
    await bot.online(30)
    assert await bot.send("bob", b"hello")
    assert server.accepted_links == 0


async def test_sandbox_answers_queries() -> None:
    async with session_sandbox() as sandbox:
        bot = sandbox.session
        await bot.mark_read("ann", "1")
        await bot.set_presence("available")
        assert await bot.group("info", group="g") is None
        media = await bot.upload("image", b"bytes")
        await bot.send_media("ann", media)
        assert sandbox.sent[-1].content == media


async def test_sandbox_receive_times_out_without_a_consumer() -> None:
    async with session_sandbox() as sandbox:
        with pytest.raises(AssertionError, match="the event was not handled"):
            await sandbox.receive(Text("ping"), timeout=0.05)


async def test_session_via_can_be_copied(sessions: Sessions) -> None:
    via = copy.copy(sessions.via("alice"))
    with pytest.raises(SessionError, match="start one"):
        _ = via.state


# -- leases ----------------------------------------------------------------------------------------


async def test_two_sessions_objects_of_one_process_share_no_lease(server: DemoServer) -> None:
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases) as first,
        Sessions(leases=leases) as second,
    ):
        await first.connect("alice", Demo(server))
        with pytest.raises(AlreadyRunning):
            await second.start("alice", Demo(server))
        await first.stop("alice")
        assert await second.connect("alice", Demo(server))


async def test_session_without_its_lease_changes_no_records(server: DemoServer) -> None:
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases, lease_ttl=6.0) as sessions,
    ):
        alice = await sessions.connect("alice", Demo(server))
        await alice.records.put("session", "bob", b"1")
        assert alice._runtime.lease is not None
        (held,) = await leases.held()
        await leases.revoke(held.id, held.key)
        await alice._runtime.lease.lost()
        with pytest.raises(StorageError, match="lease"):
            await alice.records.update("session", "bob", lambda old: b"2")
        assert await alice.records.get("session", "bob") == b"1"


async def test_event_limit_below_the_receive_maximum_is_refused() -> None:
    async with Sessions(events=10) as sessions:
        with pytest.raises(SessionError, match="raise events"):
            await sessions.start("alice", Mqtt("mqtt://127.0.0.1:1", receive_maximum=11))
        assert len(sessions) == 0


async def test_credentials_that_cannot_be_stored_are_reported_as_an_event() -> None:
    class Full(MemoryStorage):
        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            raise StorageError("the disk is full")

    server = DemoServer(pairing=True)
    events: list[Incoming] = []
    async with Sessions(storage=Full(), backoff=Backoff(0.01, 0.05)) as sessions:
        alice = await sessions.start("alice", Demo(server), on_event=events.append)
        await until(lambda: server.waiting)
        server.confirm("alice")
        await alice.online(30)
        await until(lambda: [each for each in events if each.type == "credentials_not_kept"])
