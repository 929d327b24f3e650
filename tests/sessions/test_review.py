"""What users do that nobody planned for: each of these once lost a send, a message or a session."""

from __future__ import annotations

import asyncio
import copy
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
from moored.sessions.link._keepalive import Keepalive, KeepaliveStep
from moored.sessions.mqtt import Message, Mqtt
from moored.sessions.mqtt._dialogue import MqttDialogue
from moored.sessions.sending._acks import SLACK, AckTable, Parked
from moored.sessions.storage._memory import MemoryStorage
from moored.testing import session_sandbox
from moored.testing.demo import Demo, DemoServer

#: Longer than any test: whoever needs it was not told otherwise.
LONG = 300.0


# -- steps -----------------------------------------------------------------------------------------


async def give_up() -> None:
    """What a step that waits for something cancelled ends in."""
    other = asyncio.create_task(asyncio.sleep(LONG))
    other.cancel()
    await other


async def test_a_step_whose_work_was_cancelled_tells_all_who_wait(
    sessions: Sessions, server: DemoServer
) -> None:
    async def step(outgoing: Outgoing, session: Any) -> Outgoing:
        await asyncio.sleep(0)
        if outgoing.content == b"bad":
            await give_up()
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


async def test_a_plain_step_that_raises_a_cancellation_cancels_nobody(
    sessions: Sessions, server: DemoServer
) -> None:
    def step(outgoing: Outgoing, session: Any) -> Outgoing:
        raise asyncio.CancelledError

    alice = await sessions.connect("alice", Demo(server), steps=[("encrypt", step)])
    assert isinstance(await alice.send("bob", b"hello", outcome=True), NotSent)
    assert alice.status()["sending"] == 0


async def test_a_step_that_never_ends_ends_with_its_send(
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


async def test_the_recorder_repeats_no_words_of_a_step(
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
    assert "a sender has crashed with 1 send: KeyError" in texts
    assert "bob-5551" not in texts
    assert "attack" not in texts


# -- sends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipient", "id"), [(None, None), (5, None), (["bob"], None), ("bob", 5)]
)
async def test_what_is_no_recipient_or_id_leaves_nothing_behind(
    sessions: Sessions, server: DemoServer, recipient: Any, id: Any
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    with pytest.raises(TypeError, match="must be a str"):
        await alice.send(recipient, b"hello", id=id)
    assert alice.status()["sending"] == 0


async def test_a_protocol_that_cannot_write_one_send_fails_it_at_once(
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


def test_a_message_that_makes_no_packet_is_one_failed_send() -> None:
    message = Message(b"", user_properties=(("a", 5),))  # type: ignore[arg-type]
    protocol = Mqtt("mqtt://127.0.0.1", subscribe=())
    dialogue = protocol.begin("alice", None, protocol.remember())
    assert isinstance(dialogue, MqttDialogue)
    list(dialogue.feed(bytes.fromhex("2003000000")))
    with pytest.raises(StepFailed, match="it cannot be sent over MQTT"):
        dialogue.write(Outgoing("1", "bob", message))


async def test_an_id_that_is_sent_again_takes_two_places_in_the_window(
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


def test_a_timeout_for_each_send_leaves_no_queue_for_each() -> None:
    table = AckTable(lambda parked, outcome: None)
    table.park(Parked(Outgoing("first", "bob", b""), LONG, LONG))
    for number in range(10 * SLACK):
        parked = Parked(Outgoing(str(number), "bob", b""), float(number), float(number))
        table.park(parked)
        table.failed(parked, "done")
    assert len(table._queues) <= SLACK + 4
    assert table.next_deadline() == LONG


# -- events ----------------------------------------------------------------------------------------


async def test_a_handler_may_stop_its_session(sessions: Sessions, server: DemoServer) -> None:
    stopped = asyncio.Event()

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            await sessions.stop("alice")
            stopped.set()

    await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", b"quit", sender="bob")
    # It used to wait for itself, and to be cancelled for that.
    async with asyncio.timeout(30):
        await stopped.wait()
    assert sessions.whereis("alice") is None


async def test_a_handler_whose_work_was_cancelled_has_failed_at_one_message(
    sessions: Sessions, server: DemoServer
) -> None:
    seen = []

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            seen.append(event.data.content)
            if seen == [b"1"]:
                await give_up()

    alice = await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", b"1", sender="bob")
    server.deliver("alice", b"2", sender="bob")
    await until(lambda: seen[:2] == [b"1", b"2"])
    assert alice.status()["handler_failures"] == 1
    assert alice.status()["events_waiting"] == 0


async def test_a_handler_that_makes_room_for_another_gets_nothing_more() -> None:
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


async def test_a_flood_of_events_costs_no_message_that_is_to_be_acknowledged() -> None:
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


# -- storage, life and links -----------------------------------------------------------------------


class Moody(MemoryStorage):
    """A storage that has bad days."""

    mood = "good"

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        match self.mood:
            case "away":
                raise StorageError("the disk is away")
            case "odd":
                raise LookupError("an error of a library below")
            case "silent":
                await asyncio.sleep(LONG)
        return await super().get(profile, namespace, key)


@pytest.mark.parametrize(
    ("mood", "says"), [("away", "disk is away"), ("odd", "LookupError"), ("silent", "Timeout")]
)
async def test_an_account_comes_back_with_its_storage(
    server: DemoServer, mood: str, says: str
) -> None:
    storage = Moody()
    async with Sessions(
        storage=storage, backoff=Backoff(0.01, 0.05), connect_timeout=0.5
    ) as sessions:
        alice = await sessions.connect("alice", Demo(server))
        storage.mood = mood
        server.cut("alice")
        await until(lambda: says in alice.status()["reason"])
        storage.mood = "good"
        await alice.online(30)
        assert alice.status()["crashes"] == 0


class Slow(MemoryStorage):
    """A storage that takes its time."""

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        await asyncio.sleep(0.01)
        return await super().get(profile, namespace, key)

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        await asyncio.sleep(0.01)
        await super().put(profile, namespace, key, value)


def one_more(old: bytes | None) -> bytes:
    return b"%d" % (int(old or b"0") + 1)


async def test_no_change_of_a_record_is_lost_between_two_sessions_of_a_profile(
    server: DemoServer,
) -> None:
    async with Sessions(storage=Slow()) as sessions:
        first = await sessions.connect("alice", Demo(server))
        changes = [first.records.update("session", "bob", one_more) for _ in range(5)]
        under_way = [asyncio.create_task(change) for change in changes]
        await asyncio.sleep(0)
        await first.stop()
        second = await sessions.connect("alice", Demo(server))
        await asyncio.gather(*under_way)
        assert await second.records.update("session", "bob", one_more) == b"6"
        with pytest.raises(StorageError, match="its session has ended"):
            await first.records.update("session", "bob", one_more)


async def test_what_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="unknown scheme nonsense"):
        async with Sessions(storage=f"files:{tmp_path}", leases="nonsense://"):
            pass
    async with Sessions(storage=f"files:{tmp_path}") as sessions:
        assert len(sessions) == 0


async def test_a_server_that_talks_nonsense_does_not_fill_the_logs(
    sessions: Sessions, server: DemoServer, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await sessions.connect("alice", Demo(server))
    for _ in range(600):
        server.say("alice", {"k": "?"})
    await until(lambda: alice.status()["unhandled"] == 600)
    ours = [each for each in caplog.records if each.name == "moored.sessions"]
    assert len(ours) == 100 + len((128, 256, 512))


async def test_an_old_loss_is_not_the_reason_of_a_later_end(
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


async def test_a_session_without_a_server_never_gets_one(
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


async def test_a_bot_in_the_sandbox_may_ask_the_server() -> None:
    async with session_sandbox() as sandbox:
        bot = sandbox.session
        await bot.mark_read("ann", "1")
        await bot.set_presence("available")
        assert await bot.group("info", group="g") is None
        media = await bot.upload("image", b"bytes")
        await bot.send_media("ann", media)
        assert sandbox.sent[-1].content == media


async def test_the_sandbox_does_not_wait_for_a_bot_that_is_dead() -> None:
    async with session_sandbox() as sandbox:
        with pytest.raises(AssertionError, match="the event was not handled"):
            await sandbox.receive(Text("ping"), timeout=0.05)


async def test_a_name_for_a_session_can_be_copied(sessions: Sessions) -> None:
    via = copy.copy(sessions.via("alice"))
    with pytest.raises(SessionError, match="start one"):
        _ = via.state


def test_a_server_that_takes_what_was_written_lives() -> None:
    keepalive = Keepalive(30.0, 5.0, 0.0)
    assert keepalive.look(30.0, 1000) == (KeepaliveStep.ASK, 35.0)
    assert keepalive.look(35.0, 600) == (KeepaliveStep.WAIT, 40.0)
    assert keepalive.look(40.0, 0) == (KeepaliveStep.WAIT, 45.0)
    assert keepalive.look(45.0, 0) == (KeepaliveStep.LOST, 45.0)


def test_a_server_that_takes_nothing_is_lost() -> None:
    keepalive = Keepalive(30.0, 5.0, 0.0)
    assert keepalive.look(30.0, 1000) == (KeepaliveStep.ASK, 35.0)
    assert keepalive.look(35.0, 1000) == (KeepaliveStep.LOST, 35.0)


def test_a_server_hears_from_us_while_we_wait_for_its_answer() -> None:
    keepalive = Keepalive(2.0, 5.0, 0.0)
    assert keepalive.look(2.0) == (KeepaliveStep.ASK, 4.0)
    assert keepalive.look(4.0) == (KeepaliveStep.ASK, 6.0)
    keepalive.said_at = 5.0
    assert keepalive.look(6.0) == (KeepaliveStep.WAIT, 7.0)
    assert keepalive.look(7.0) == (KeepaliveStep.LOST, 7.0)


def test_an_answer_ends_the_wait_and_the_next_question_is_in_time() -> None:
    keepalive = Keepalive(2.0, 5.0, 0.0)
    assert keepalive.look(2.0) == (KeepaliveStep.ASK, 4.0)
    keepalive.heard_at = 2.1
    assert keepalive.look(4.0) == (KeepaliveStep.ASK, 6.0)
    keepalive.heard_at = 4.1
    keepalive.said_at = 5.0
    assert keepalive.look(6.0) == (KeepaliveStep.WAIT, 6.1)


# -- leases ----------------------------------------------------------------------------------------


async def test_two_objects_of_one_process_share_no_lease(server: DemoServer) -> None:
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


async def test_without_its_lease_a_session_changes_no_records(server: DemoServer) -> None:
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases, lease_ttl=1.5) as sessions,
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


async def test_a_sink_that_is_smaller_than_what_may_come_is_refused() -> None:
    async with Sessions(events=10) as sessions:
        with pytest.raises(SessionError, match="raise events"):
            await sessions.start("alice", Mqtt("mqtt://127.0.0.1:1", receive_maximum=11))
        assert len(sessions) == 0


async def test_credentials_that_cannot_be_kept_are_told() -> None:
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
