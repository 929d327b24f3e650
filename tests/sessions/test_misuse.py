"""Wrong calls, names that a broker refuses, full disks, and queries without a link."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.storages import FullStorage
from tests.sessions.support import LIMIT, Broken, collect, until

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    NotConnected,
    NotSent,
    Outgoing,
    QueryFailed,
    Session,
    SessionError,
    Sessions,
    StorageError,
    Text,
    Unknown,
    open_storage,
)
from moored.sessions.link._credentials import RECORD as CREDENTIALS
from moored.sessions.mqtt import Message, Mqtt
from moored.testing.demo import Demo, DemoServer

#: Longer than any test: a wait that ends by this timeout has failed.
LONG = 300.0


# -- a crash ---------------------------------------------------------------------------------------


async def test_query_fails_when_its_session_crashes(sessions: Sessions, server: DemoServer) -> None:
    alice = await sessions.connect("alice", Broken(server))
    server.delay = LONG
    querying = asyncio.create_task(alice.query({"do": "time"}, timeout=LONG))
    await until(lambda: len(getattr(alice._runtime.connection, "queries", ())))
    server.deliver("alice", Text("hello"))
    with pytest.raises(QueryFailed, match=r"the session has crashed: .*a defect"):
        await asyncio.wait_for(querying, LIMIT)


# -- without a link -------------------------------------------------------------------------------


async def test_step_that_cannot_query_without_a_link_fails_its_own_send(
    server: DemoServer,
) -> None:
    async def look_up(outgoing: Outgoing, session: Session) -> Outgoing:
        await session.query({"do": "echo"})
        return outgoing

    async with Sessions(backoff=Backoff(LONG, LONG, jitter="none")) as sessions:
        steps = [("look_up", look_up)]
        alice = await sessions.connect("alice", Demo(server, resume=True), steps=steps)
        server.drop_acks = 1
        first = asyncio.create_task(alice.send("bob", b"1", outcome=True, timeout=LONG))
        await until(lambda: server.received)
        server.cut("alice")
        await until(lambda: alice.state == "connecting/waiting")
        second = await alice.send("bob", b"2", outcome=True, timeout=LONG)
        assert isinstance(second, NotSent)
        assert isinstance(second.reason, NotConnected)
        assert second.stage == "look_up"
        await alice.connect()
        # The server had received the first send, and confirms it on the next link.
        assert isinstance(await asyncio.wait_for(first, LIMIT), Acked)
        assert alice.status()["sender_crashes"] == 0


# -- sends for which a broker closes the link -----------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    with Mosquitto(require_server("mosquitto")) as server:
        yield server


@pytest.mark.parametrize(
    ("recipient", "content", "id"),
    [
        ("first\nsecond", b"", None),
        ("a\x7f", b"", None),
        ("a\uffff", b"", None),
        ("bob", b"", "1\t2"),
        ("bob", Message("", content_type="text/plain\n"), None),
        ("bob", Message("", response_topic="a\x85"), None),
        ("bob", Message("", user_properties=(("key\r", "value"),)), None),
    ],
)
async def test_control_character_fails_one_send_and_keeps_the_link(
    sessions: Sessions, broker: Mosquitto, recipient: str, content: Any, id: str | None
) -> None:
    # A broker closes the link for it, and the resumed link would send it again.
    alice = await sessions.connect("alice", Mqtt(broker.url()))
    outcome = await alice.send(recipient, content, id=id, outcome=True, timeout=LIMIT)
    assert isinstance(outcome, NotSent)
    assert "control character" in str(outcome.reason)
    assert isinstance(await alice.send("bob", b"after"), Acked)
    assert alice.status()["reconnects"] == 0


async def test_profile_with_a_control_character_is_refused(
    sessions: Sessions, broker: Mosquitto
) -> None:
    with pytest.raises(SessionError, match=r"the profile cannot be used .*: it has a control"):
        await sessions.connect("al\nice", Mqtt(broker.url()))


async def test_send_for_which_the_broker_closes_every_link_is_given_up(broker: Mosquitto) -> None:
    # Mosquitto accepts at most 200 topic levels.
    async with Sessions(backoff=Backoff(0.01, 0.05)) as sessions:
        alice = await sessions.connect("alice", Mqtt(broker.url()))
        outcomes = await asyncio.gather(
            alice.send("bob", b"1", outcome=True, timeout=LONG),
            alice.send("deep/" * 300, b"2", outcome=True, timeout=LONG),
            alice.send("bob", b"3", outcome=True, timeout=LONG),
            alice.send("deep/" * 300, b"4", outcome=True, timeout=LONG, idempotent=True),
            alice.send("bob", b"5", outcome=True, timeout=LONG),
        )
        await alice.online(LIMIT)
        assert isinstance(await alice.send("bob", b"after", timeout=LIMIT), Acked)
    assert [type(each) for each in outcomes] == [Acked, Unknown, Acked, Unknown, Acked]


# -- storage ---------------------------------------------------------------------------------------


async def test_storage_directory_on_a_full_disk_is_refused_without_leaking_files(
    tmp_path: Path,
) -> None:
    # /dev/full stands for a full disk: the directory's lock file cannot be written.
    (tmp_path / ".lock").symlink_to("/dev/full")
    for _ in range(3):
        with pytest.raises(StorageError, match="cannot be used as storage"):
            await open_storage(f"files:{tmp_path}").open()
    assert not [each for each in _open_files() if each == "/dev/full"]


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass  # the descriptor of the listing itself


async def test_unsaved_credentials_are_saved_before_a_later_link() -> None:
    server, storage = DemoServer(pairing=True), FullStorage()
    async with Sessions(storage=storage, backoff=Backoff(0.01, 0.05)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        events = collect(alice)
        await until(lambda: server.waiting)
        server.confirm("alice")
        await alice.online(LIMIT)
        await until(lambda: "credentials_not_kept" in [each.type for each in events])
        storage.full = False
        server.cut("alice")
        await until(lambda: alice.status()["reconnects"] == 1)
    assert await storage.get("alice", *CREDENTIALS)


def test_error_for_an_unknown_storage_hides_the_password() -> None:
    with pytest.raises(StorageError, match="no storage for postgres://") as caught:
        open_storage("postgres://user:s3cret@host/accounts")
    assert "s3cret" not in str(caught.value)


# -- wrong calls -----------------------------------------------------------------------------------


async def test_calls_from_another_event_loop_are_refused(
    sessions: Sessions, server: DemoServer
) -> None:
    alice = await sessions.connect("alice", Demo(server))

    async def in_another_loop() -> None:
        for call in (
            alice.send("bob", b""),
            alice.query({"do": "time"}),
            alice.stop(),
            sessions.start("bob", Demo(server)),
        ):
            with pytest.raises(SessionError, match="another event loop"):
                await call

    await asyncio.to_thread(asyncio.run, in_another_loop())
    assert isinstance(await alice.send("bob", b""), Acked)
    assert len(sessions) == 1


async def test_invalid_profile_or_protocol_is_refused(
    sessions: Sessions, server: DemoServer
) -> None:
    with pytest.raises(TypeError, match="profile must be a str, not int"):
        await sessions.start(5, Demo(server))  # type: ignore[arg-type]
    address: Any = "mqtt://user:s3cret@broker"
    with pytest.raises(TypeError, match=r"protocol must be a Protocol, .* not str$"):
        await sessions.start("alice", address)
    assert not len(sessions)


async def test_invalid_handler_or_steps_are_refused(sessions: Sessions, server: DemoServer) -> None:
    wrong: Any
    for wrong in ("handle", 5, []):
        with pytest.raises(TypeError, match="the handler must be a function"):
            await sessions.start("alice", Demo(server), on_event=wrong)
    for wrong in ([print], {"sign": print}, [("sign", "sign")], [("sign", print, 1)]):
        with pytest.raises(TypeError, match="steps are pairs"):
            await sessions.start("alice", Demo(server), steps=wrong)
    assert not len(sessions)
    alice = await sessions.connect("alice", Demo(server), steps=[("same", lambda send, _: send)])
    with pytest.raises(TypeError, match="the handler must be a function"):
        alice.attach(5)  # type: ignore[arg-type]
    assert isinstance(await alice.send("bob", b""), Acked)
