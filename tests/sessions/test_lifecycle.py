"""Start and stop of sessions: concurrently, during a start, by a handler, during a pause."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.leases.virtual import in_virtual_time
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.leases import Leases, MemoryStore, Request, StoreMisconfigured, connect
from moored.sessions import (
    Acked,
    AlreadyRunning,
    CloseClass,
    Incoming,
    LoginStep,
    NotConnected,
    ProtocolError,
    RetryCache,
    Session,
    Sessions,
    SessionStopped,
    Text,
    Unknown,
)
from moored.sessions._protocol import DialogueEvent
from moored.sessions._sessions import CLOSING
from moored.sessions.link._connection import LOGIN_TIMEOUT
from moored.sessions.storage._memory import MemoryStorage
from moored.testing import Sim, scaled
from moored.testing.demo import Demo, DemoServer
from moored.testing.demo._protocol import DemoDialogue

#: How long a handler has to finish its event at the end of a session.
PATIENCE = 5.0
#: Longer than any test.
LONG = 300.0


async def hang(event: Incoming) -> None:
    """A handler that never returns."""
    await asyncio.get_running_loop().create_future()


def now() -> float:
    return asyncio.get_running_loop().time()


# -- closing all sessions ------------------------------------------------------------------------


class SlowStore(MemoryStore):
    """A store that takes a second to release a lease, and fails for the key `refused`."""

    refused = ""

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        await asyncio.sleep(1.0)
        if any(request.key.endswith(self.refused or "/") for request in requests):
            raise StoreMisconfigured("this key is refused")
        return await super().release(requests)


async def online_sessions(sessions: Sessions, count: int, handler: object = None) -> list[Session]:
    """Return that online_sessions sessions, online."""
    server = DemoServer()
    made = [
        sessions.connect(f"account-{number}", Demo(server), on_event=handler)
        for number in range(count)
    ]
    return list(await asyncio.gather(*made))


@in_virtual_time
async def test_many_sessions_with_hung_handlers_close_concurrently(sim: Sim) -> None:
    async with Sessions(connect_rate=1e6, connect_burst=1000) as sessions:
        made = await online_sessions(sessions, scaled(300, least=60), hang)
        began = now()
    assert now() - began == pytest.approx(PATIENCE, abs=0.1)
    assert not len(sessions)
    assert {session.state for session in made} == {"stopped"}


@in_virtual_time
async def test_leases_are_released_concurrently(sim: Sim) -> None:
    store = SlowStore()
    async with Leases(store) as leases:
        async with Sessions(leases=leases, connect_burst=1000) as sessions:
            await online_sessions(sessions, 30)
            assert len(await leases.held()) == 30
            began = now()
        assert now() - began == pytest.approx(1.0, abs=0.1)
        assert not await leases.held()


def test_session_that_fails_to_stop_does_not_block_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        store = SlowStore()
        async with Leases(store) as leases:
            async with Sessions(leases=leases, lease_ttl=LONG) as sessions:
                made = await online_sessions(sessions, 5)
                store.refused = "account-2"
            assert not len(sessions)
            assert {session.state for session in made} == {"stopped"}
            assert [held.key for held in await leases.held()] == ["sessions/account-2"]
            store.refused = ""

    with caplog.at_level(logging.WARNING, "moored.supervisor"):
        scenario()
    messages = [record.message for record in caplog.records]
    assert any("sessions/account-2 failed while stopping: this key" in each for each in messages)


class ClosableStorage(MemoryStorage):
    """A storage that records whether it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True
        await super().close()


@in_virtual_time
async def test_cancelled_close_still_completes(sim: Sim) -> None:
    storage = ClosableStorage()
    sessions = Sessions(storage=storage, leases="memory://")
    await sessions.open()
    made = await online_sessions(sessions, 3, hang)
    began = now()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await sessions.close()
    assert now() - began == pytest.approx(PATIENCE, abs=0.1)
    assert {session.state for session in made} == {"stopped"}
    assert storage.closed


async def test_second_close_waits_for_the_first(server: DemoServer) -> None:
    storage = ClosableStorage()
    sessions = Sessions(storage=storage)
    await sessions.open()
    began, may_end = asyncio.Event(), asyncio.Event()

    async def handler(event: Incoming) -> None:
        began.set()
        await may_end.wait()

    await sessions.connect("alice", Demo(server), on_event=handler)
    await began.wait()
    closes = [asyncio.create_task(sessions.close()) for _ in range(2)]
    asyncio.get_running_loop().call_soon(may_end.set)
    await closes[1]
    assert storage.closed
    await closes[0]


@in_virtual_time
async def test_handlers_of_several_sessions_can_close_all_sessions(sim: Sim) -> None:
    sessions, server = Sessions(), DemoServer()
    await sessions.open()
    closed, bob_has_it = [], asyncio.Event()

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            if event.profile == "bob":
                bob_has_it.set()
                await asyncio.sleep(1.0)  # until the close by alice waits for this handler
            await bob_has_it.wait()
            await sessions.close()
            closed.append(event.profile)

    for profile in ("alice", "bob"):
        await sessions.connect(profile, Demo(server), on_event=handler)
    began = now()
    for profile in ("alice", "bob"):
        server.deliver(profile, Text("close"), sender="carol")
    await until(lambda: len(closed) == 2)
    assert now() - began < PATIENCE, "close() has waited for a handler that waited for it"


async def test_handler_can_close_all_sessions(server: DemoServer) -> None:
    sessions = Sessions()
    await sessions.open()
    closed = asyncio.Event()

    async def handler(event: Incoming) -> None:
        if event.type == "connection_update" and event.data.state == "online":
            await sessions.close()
            closed.set()

    async with asyncio.timeout(PATIENCE - 1):
        await sessions.start("alice", Demo(server), on_event=handler)
        await closed.wait()
    assert not len(sessions)


# -- a stop during a start ---------------------------------------------------------------


class BlockingStorage(MemoryStorage):
    """A storage whose `new()` waits until `may` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.called = asyncio.Event()
        self.may = asyncio.Event()

    async def new(self, profile: str) -> bool:
        self.called.set()
        await self.may.wait()
        return await super().new(profile)


@pytest.mark.parametrize("close", [False, True])
async def test_session_stopped_during_its_start_does_not_start(
    server: DemoServer, close: bool
) -> None:
    storage = BlockingStorage()
    async with connect("memory://") as leases, Sessions(storage=storage, leases=leases) as sessions:
        start = asyncio.create_task(sessions.start("alice", Demo(server)))
        await storage.called.wait()
        stop = asyncio.create_task(sessions.close() if close else sessions.stop("alice"))
        await until(lambda: [each.state for each in sessions] == ["stopped"])
        assert not stop.done(), "the profile is not free yet"
        storage.may.set()
        async with asyncio.timeout(30):
            await stop
            with pytest.raises(SessionStopped, match="closed" if close else "it was stopped"):
                await start
        assert not len(sessions)
        assert sessions.whereis("alice") is None
        assert not sessions.tree().children
        assert not await leases.held()
        if not close:
            again = await sessions.connect("alice", Demo(server))
            assert again.state == "online"
        assert server.accepted_links == (not close)


@in_virtual_time
async def test_hung_storage_delays_close_by_a_limit_only(sim: Sim) -> None:
    storage = BlockingStorage()
    async with Sessions(storage=storage) as sessions:
        start = asyncio.create_task(sessions.start("alice", Demo(DemoServer())))
        await storage.called.wait()
        began = now()
    assert now() - began == pytest.approx(CLOSING, abs=0.1)
    storage.may.set()
    with pytest.raises(SessionStopped):
        await start
    assert not len(sessions)


def stopped_after(iterations: int) -> None:
    """Stop a session that online_sessions loop iterations after its start has begun."""

    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        server, storage = DemoServer(), BlockingStorage()
        storage.may.set()
        async with (
            connect("memory://") as leases,
            Sessions(leases=leases, storage=storage) as sessions,
        ):
            start = asyncio.create_task(sessions.start("alice", Demo(server)))
            await storage.called.wait()
            for _ in range(iterations):
                await asyncio.sleep(0)
            await sessions.stop("alice")
            assert not len(sessions)
            assert not await leases.held()
            assert not sessions.tree().children
            (found,) = await asyncio.gather(start, return_exceptions=True)
            if isinstance(found, Session):
                assert found.state == "stopped"
            else:
                assert isinstance(found, SessionStopped), found
            await sessions.connect("alice", Demo(server))

    scenario()


def test_stop_at_any_moment_of_a_start_leaves_nothing_behind() -> None:
    for iterations in range(30):
        stopped_after(iterations)


async def test_stop_of_a_start_does_not_end_the_next_session(server: DemoServer) -> None:
    storage = BlockingStorage()
    async with Sessions(storage=storage) as sessions:
        first = asyncio.create_task(sessions.start("alice", Demo(server)))
        await storage.called.wait()
        with pytest.raises(AlreadyRunning):
            await sessions.start("alice", Demo(server))
        stop = asyncio.create_task(sessions.stop("alice"))
        await until(lambda: [each.state for each in sessions] == ["stopped"])
        storage.may.set()
        await stop
        second = await sessions.connect("alice", Demo(server))
        with pytest.raises(SessionStopped):
            await first
        assert sessions.whereis("alice") is second
        assert second.state == "online"


@in_virtual_time
async def test_start_that_ends_late_does_not_hide_the_next_one(sim: Sim) -> None:
    server, storage = DemoServer(), BlockingStorage()
    async with Sessions(storage=storage) as sessions:
        first = asyncio.create_task(sessions.start("alice", Demo(server), on_event=hang))
        await storage.called.wait()
        stop = asyncio.create_task(sessions.stop("alice"))
        await until(lambda: [each.state for each in sessions] == ["stopped"])
        storage.may.set()
        await until(lambda: not len(sessions))
        # Its profile is free, while its handler has not returned yet.
        storage.may.clear()
        second = asyncio.create_task(sessions.start("alice", Demo(server)))
        await stop
        with pytest.raises(SessionStopped):
            await first
        stop = asyncio.create_task(sessions.stop("alice"))
        await asyncio.sleep(1.0)
        assert not stop.done(), "the second start has not finished"
        storage.may.set()
        with pytest.raises(SessionStopped):
            await second
        await stop
        assert not sessions.tree().children


class Repeating(Demo):
    repeats = True


class StartFailure(Exception):
    """Raised by the retry cache factory of a test."""


async def test_failed_start_raises_its_own_error(server: DemoServer) -> None:
    def no_cache() -> RetryCache:
        raise StartFailure("no cache") from LookupError("the reason")

    async with Sessions(retry_cache=no_cache) as sessions:
        with pytest.raises(StartFailure, match="no cache") as found:
            await sessions.start("alice", Repeating(server))
        assert isinstance(found.value.__cause__, LookupError)
        assert not len(sessions)
        assert not sessions.tree().children


# -- a handler that ends its own session -----------------------------------------------------------


@pytest.mark.parametrize("in_a_task", [True, False])
async def test_handler_that_stops_its_session_is_acknowledged_only_if_it_returns(
    sessions: Sessions, server: DemoServer, in_a_task: bool
) -> None:
    stops: list[asyncio.Task[None]] = []

    async def handler(event: Incoming) -> None:
        if event.type == "messages_upsert":
            if in_a_task:
                stops.append(asyncio.create_task(alice.stop()))
            else:
                await alice.stop()

    alice = await sessions.connect("alice", Demo(server), on_event=handler)
    server.deliver("alice", Text("that is handler"))
    async with asyncio.timeout(PATIENCE - 1):
        await until(lambda: not len(sessions))
        await asyncio.gather(*stops)
    assert server.mail("alice") == (not in_a_task)


# -- connect() during a pause --------------------------------------------------------------------


@pytest.mark.parametrize("via", [False, True])
async def test_connect_ends_a_pause(server: DemoServer, via: bool) -> None:
    server.refusing = True
    async with Sessions(backoff=Backoff(LONG, LONG)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        await until(lambda: alice.state == "connecting/waiting")
        server.refusing = False
        async with asyncio.timeout(30):
            await (sessions.via("alice") if via else alice).connect(LONG)
        assert alice.state == "online"


async def test_connect_during_a_pause_raises_when_the_attempt_fails(server: DemoServer) -> None:
    server.refusing = True
    async with Sessions(backoff=Backoff(LONG, LONG)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        await until(lambda: alice.state == "connecting/waiting")
        generation = alice.generation
        with pytest.raises(NotConnected, match="refuses new links"):
            await alice.connect(1.0)
        assert alice.generation == generation + 1
        assert alice.state == "connecting/waiting"


# -- credentials at the end of a session ----------------------------------------------------------


class SlowStorage(MemoryStorage):
    """A storage that takes a second to write."""

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        await asyncio.sleep(1.0)
        await super().put(profile, namespace, key, value)


@in_virtual_time
async def test_latest_credentials_are_saved_before_the_profile_is_free(sim: Sim) -> None:
    storage = SlowStorage()
    async with Sessions(storage=storage) as sessions:
        alice = await sessions.connect("alice", Demo(DemoServer()))
        alice._runtime.credentials.keep(b"first")
        await asyncio.sleep(0.5)
        alice._runtime.credentials.keep(b"second")  # while the first ones are being written
        await alice.stop()
        assert await storage.get("alice", "creds", "creds") == b"second"


# -- a limit of attempts ---------------------------------------------------------------------


async def test_session_that_used_all_attempts_can_be_connected_again(server: DemoServer) -> None:
    events: list[Incoming] = []
    async with Sessions(backoff=Backoff(0.01, 0.01, max_attempts=3)) as sessions:
        alice = await sessions.connect("alice", Demo(server), on_event=events.append)
        server.drop_acks = 1
        sent = asyncio.create_task(alice.send("bob", b"", outcome=True, idempotent=True))
        await until(lambda: server.dropped_acks)
        held = asyncio.create_task(alice.send("bob", b"", outcome=True, hold=True))
        server.refusing = True
        server.cut("alice")
        # Both wait for a link, and are settled when the attempts are used up.
        async with asyncio.timeout(10):
            assert isinstance(await sent, Unknown)
            await held
        await until(lambda: alice.state == "offline/refused")
        assert "given up after attempt 3" in alice.status()["reason"]
        await until(lambda: events[-1].data.state == "offline/refused")
        assert "session_crashed" not in {event.type for event in events}
        server.refusing = False
        await alice.connect(10)
        assert isinstance(await alice.send("bob", b""), Acked)


# -- a login step ------------------------------------------------------------------------


class TogetherDialogue(DemoDialogue):
    """A dialogue that gets a login step in one read with the welcome or an invalid frame."""

    __slots__ = ("valid",)
    valid: bool

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        yield LoginStep("pairing code", "1234")
        if not self.valid:
            raise ProtocolError("not a frame")
        yield from super().feed(data)


class Together(Demo):
    valid = True

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> DemoDialogue:
        dialogue = TogetherDialogue(profile, credentials, memory)
        dialogue.valid = self.valid
        return dialogue


@in_virtual_time
async def test_login_step_and_welcome_in_one_read_complete_the_dial(sim: Sim) -> None:
    async with Sessions() as sessions:
        alice = await sessions.connect("alice", Together(DemoServer()))
        await asyncio.sleep(2 * LOGIN_TIMEOUT)
        assert (alice.state, alice.generation) == ("online", 1)


@in_virtual_time
async def test_login_step_and_invalid_frame_in_one_read_end_the_dial(sim: Sim) -> None:
    protocol = Together(DemoServer())
    protocol.valid = False
    async with Sessions(backoff=Backoff(1.0, 1.0)) as sessions:
        alice = await sessions.start("alice", protocol)
        await until(lambda: alice.generation > 10)
        dials = [each for each in asyncio.all_tasks() if "_dial" in repr(each.get_coro())]
        assert len(dials) <= 1, "the dials of lost links still wait for a login"


# -- status() -----------------------------------------------------------------------------


@in_virtual_time
async def test_status_reports_reason_and_time_of_the_next_attempt(sim: Sim) -> None:
    server = DemoServer()
    server.refusing = True
    async with Sessions(backoff=Backoff(8.0, 60.0)) as sessions:
        alice = await sessions.start("alice", Demo(server))
        await asyncio.sleep(3.0)
        (status,) = sessions.status()
        assert status["state"] == "connecting/waiting"
        assert status["kind"] == CloseClass.TRANSIENT.value
        assert "refuses new links" in status["reason"]
        assert status["next_attempt_in"] == pytest.approx(5.0)
        assert status["reconnects"] == 0
        json.dumps(status)

        server.refusing = False
        await alice.online()
        status = alice.status()
        assert (status["kind"], status["reason"], status["next_attempt_in"]) == (None, "", None)
        assert status["reconnects"] == 0, "the first link is not a reconnect"

        server.cut("alice")
        await until(lambda: alice.state == "connecting/waiting")
        await alice.connect()
        assert alice.status()["reconnects"] == 1

        server.revoke("alice")
        await until(lambda: alice.state == "offline/refused")
        status = alice.status()
        assert status["kind"] == CloseClass.AUTHENTICATION.value
        assert status["reason"]
        assert status["next_attempt_in"] is None
