"""At most one session per profile in a cluster, also if its process or the lease store fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import aiomqtt
import pytest
from tests.leases.redis_server import RedisServer
from tests.programs import Program
from tests.servers import require_server
from tests.sessions import account
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.support import LIMIT, until

from moored.kernel import Backoff, Clock
from moored.leases import (
    Grant,
    Held,
    LeaseLost,
    Leases,
    MemoryStore,
    Request,
    StoreUnavailable,
    connect,
)
from moored.sessions import (
    Acked,
    AlreadyRunning,
    CloseClass,
    Incoming,
    NotSent,
    Outcome,
    Session,
    Sessions,
    Tcp,
    Unknown,
)
from moored.sessions.link._closing_links import ClosingLinks
from moored.sessions.link._link import Link
from moored.sessions.mqtt import Mqtt
from moored.sessions.transport._transport import Transport
from moored.testing import FaultProxy
from moored.testing.demo import Demo, DemoServer

#: Lifetime of a lease that is not renewed, in seconds.
TTL = 3.0
#: The same, for tests within this process.
SHORT = 4.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as server:
        yield server


@pytest.fixture(params=["redis", pytest.param("postgres", marks=pytest.mark.soak)])
def leases_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty lease store on a real server."""
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    return f"{request.getfixturevalue('redis').url}?prefix={tmp_path.name}"


class Account:
    """A process that holds a session, or tries to get it."""

    def __init__(
        self,
        name: str,
        leases: str,
        port: int,
        *,
        retries: bool = False,
        send_window: int = 1000,
    ) -> None:
        self.name = name
        self._settings = {
            "name": name,
            "leases": leases,
            "ttl": TTL,
            "broker": f"mqtt://127.0.0.1:{port}",
            "retries": retries,
            "send_window": send_window,
        }
        self.reports: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._program = Program(account.__name__, json.dumps(self._settings))
        self._reading = asyncio.create_task(asyncio.to_thread(self._read))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._program.kill()
        await self._reading
        self._program.__exit__()

    def _read(self) -> None:
        for line in self._program.stdout:
            self.reports.append(json.loads(line))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._program.send_signal(number)

    @property
    def pid(self) -> int:
        return self._program.pid

    def of(self, what: str) -> list[dict[str, Any]]:
        """Return its reports of one kind."""
        return [each for each in self.reports if each["what"] == what]

    async def reported(self, what: str, limit: float = 30.0, **data: Any) -> dict[str, Any]:
        """Wait for a report of this kind with this data, and return it."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.of(what) if data.items() <= each.items()]

        await until(found, limit)
        return found()[0]

    async def finish(self) -> dict[str, str]:
        """Let it finish its sends, and return the outcome of each."""
        self._program.stdin.write("\n")
        self._program.stdin.flush()
        done = await self.reported("done")
        outcomes = self.of("outcome")
        assert len(outcomes) == len({each["id"] for each in outcomes}) == done["sends"]
        assert done["status"]["sending"] == 0
        return {each["id"]: each["outcome"] for each in outcomes}


@contextlib.asynccontextmanager
async def subscriber(broker: Mosquitto) -> AsyncIterator[list[str]]:
    """Yield the list of ids that have arrived at Bob, in order."""
    arrived_ids: list[str] = []
    ready = asyncio.Event()

    async def listen() -> None:
        v5 = aiomqtt.ProtocolVersion.V5
        async with aiomqtt.Client("127.0.0.1", broker.port, protocol=v5) as client:
            await client.subscribe("bob/+", qos=1)
            ready.set()
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                arrived_ids.append(message.payload.decode())

    task = asyncio.create_task(listen())
    try:
        await asyncio.wait_for(ready.wait(), 30)
        yield arrived_ids
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check(outcomes: dict[str, str], arrived_ids: list[str]) -> None:
    """Check each outcome against the ids that have arrived."""
    for id, outcome in outcomes.items():
        if outcome == "Acked":
            assert id in arrived_ids
        elif outcome == "NotSent":
            assert id not in arrived_ids
        else:
            assert outcome == "Unknown"


async def test_second_session_of_a_profile_in_one_process_is_refused() -> None:
    server = DemoServer()
    async with Sessions() as sessions:
        first = await sessions.connect("alice", Demo(server))
        attempts = [sessions.connect("alice", Demo(server)) for _ in range(5)]
        for refused in await asyncio.gather(*attempts, return_exceptions=True):
            assert isinstance(refused, AlreadyRunning)
            assert refused.current is first
        assert sessions.whereis("alice") is first
        assert server.accepted_links == 1
        await sessions.stop("alice")
        await sessions.connect("alice", Demo(server))


async def test_paused_process_loses_its_session_to_another_and_sends_nothing_more(
    leases_url: str,
) -> None:
    with Mosquitto(require_server("mosquitto")) as broker:
        async with (
            subscriber(broker) as arrived_ids,
            FaultProxy("127.0.0.1", broker.port) as proxy,
            Account("first", leases_url, proxy.port, send_window=2) as first,
        ):
            # Delay acknowledgements, so that some arrive during the pause and open the window.
            proxy.latency(0.05, "down")
            fence = (await first.reported("online"))["fence"]
            await until(lambda: len(arrived_ids) > 20)
            async with Account("second", leases_url, broker.port, retries=True) as second:
                refusal = await second.reported("already running")
                assert f"pid {first.pid}" in refusal["error"]
                first.signal(signal.SIGSTOP)
                stopped_at = time.monotonic()
                taken = await second.reported("online", limit=3 * TTL + 10)
                assert taken["fence"] > fence
                assert time.monotonic() - stopped_at < 3 * TTL + 10
                await until(lambda: any(id.startswith("second") for id in arrived_ids))
                known = len(first.of("outcome"))
                first.signal(signal.SIGCONT)
                end = await first.reported("update", limit=3 * TTL + 10, kind="TAKEOVER")
                assert end["state"] == "offline/refused"
                assert f"pid {second.pid}" in end["reason"]
                outcomes = await first.finish()
                late = first.of("outcome")[known:]
                assert "NotSent" in [each["outcome"] for each in late], (
                    "no send was pending during the pause"
                )
                seconds = await second.finish()
                assert set(seconds.values()) == {"Acked"}
                await until(lambda: set(seconds) <= set(arrived_ids))
            began = min(n for n, id in enumerate(arrived_ids) if id.startswith("second"))
            assert not [id for id in arrived_ids[began:] if id.startswith("first")]
            check(outcomes, arrived_ids)
            # It does not reconnect by itself.
            (done,) = first.of("done")
            assert done["status"]["state"] == "offline/refused"
            assert not first.of("session_crashed")


class Sender:
    """Sends every few milliseconds, and records the outcomes."""

    def __init__(self, sessions: Sessions) -> None:
        self._session = sessions.via("alice")
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self.outcomes.append(await self._session.send("bob", b"", outcome=True))
            await asyncio.sleep(0.02)


def break_store(proxy: FaultProxy, fault: str) -> None:
    """Make a store unavailable."""
    match fault:
        case "refused" | "refused briefly":
            proxy.refuse()
            proxy.reset()
        case "black hole":
            proxy.black_hole()
        case "answers lost":
            # The store executes requests, but its answers are lost: it counts a renewal, we do not.
            proxy.cut_after(0, "down")


@pytest.mark.parametrize(
    "fault",
    [
        "refused briefly",
        "answers lost",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("refused", "black hole")),
    ],
)
async def test_session_stops_while_the_store_is_down_and_resumes_with_it(
    fault: str, redis: RedisServer, tmp_path: Path
) -> None:
    server = DemoServer()
    events: list[Incoming] = []
    async with FaultProxy("127.0.0.1", redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?prefix={tmp_path.name}"
        async with (
            connect(url, timeout=1.0, margin=0.5) as leases,
            Sessions(leases=leases, lease_ttl=SHORT, backoff=Backoff(0.01, 0.1)) as sessions,
        ):
            alice = await sessions.connect("alice", Demo(server), on_event=events.append)
            sender = Sender(sessions)
            sending = asyncio.create_task(sender.run())
            fence, lease = alice.fence, alice._runtime.lease
            assert fence is not None
            assert lease is not None
            await until(lambda: len(sender.outcomes) > 10)

            break_store(proxy, fault)
            broken_at, before = time.monotonic(), len(sender.outcomes)
            # The session continues while its lease is valid.
            await until(lambda: len(sender.outcomes) > before + 10)
            assert alice.state == "online"
            assert all(isinstance(each, Acked) for each in sender.outcomes)
            # It stops before another process could get the lease.
            await until(lambda: alice.state != "online", 3 * SHORT + 10)
            assert lease.deadline < broken_at + SHORT
            await asyncio.sleep(0)
            count = len(server.received)
            known = len(sender.outcomes)
            if fault != "refused briefly":
                await until(lambda: len(sender.outcomes) > known + 20)
                assert len(server.received) == count
                assert all(isinstance(each, NotSent) for each in sender.outcomes[known:])

            # The session returns with the store by itself, even if the store still has its last
            # lease, which no other process can have held meanwhile.
            proxy.heal()
            await until(lambda: alice.state == "online")
            assert alice.fence is not None
            assert alice.fence > fence
            known = len(sender.outcomes)
            await until(lambda: len(sender.outcomes) > known + 10)
            assert isinstance(sender.outcomes[-1], Acked)
            sending.cancel()
            arrived = {each.id for each in server.received}
            for outcome in sender.outcomes:
                assert isinstance(outcome, Unknown) or isinstance(outcome, Acked) == (
                    outcome.id in arrived
                )
            kinds = {event.data.kind for event in events if event.type == "connection_update"}
            assert CloseClass.TAKEOVER not in kinds


async def test_own_lease_that_the_store_still_has_is_not_a_takeover() -> None:
    server = DemoServer()
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases, lease_ttl=SHORT, backoff=Backoff(0.01, 0.05)) as sessions,
    ):
        alice = await sessions.connect("alice", Demo(server))
        lease = alice._runtime.lease
        assert lease is not None
        # As if the answer to an acquire had been lost: the store has a lease that unused uses.
        assert await leases.revoke(lease.id, lease.key)
        ghost = await leases.acquire(lease.key, limit=1, ttl=SHORT, owner=lease.owner)
        assert ghost is not None
        with pytest.raises(LeaseLost):
            await lease.renew()
        await until(lambda: "the last lease of this session" in alice.status()["reason"])
        assert isinstance(await alice.send("bob", b"", outcome=True), NotSent)
        await ghost.release()
        await alice.online(3 * SHORT + 10)
        assert isinstance(await alice.send("bob", b""), Acked)


async def free(leases: Leases) -> None:
    """Wait until no lease is held."""
    async with asyncio.timeout(30):
        while await leases.held():  # noqa: ASYNC110 (a store has no notifications)
            await asyncio.sleep(0.01)


class SlowStore(MemoryStore):
    """A store that delays its answer to the first acquire, and all releases."""

    def __init__(self) -> None:
        super().__init__()
        self.granted_once = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def acquire(self, request: Request) -> Grant | None:
        granted = await super().acquire(request)
        if not self.granted_once.is_set():
            self.granted_once.set()
            await self.may_answer.wait()
        return granted

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        await self.may_answer.wait()
        return await super().release(requests)


async def test_cancelled_start_leaves_no_session_and_the_profile_can_start_again() -> None:
    store = SlowStore()
    async with Leases(store) as leases, Sessions(leases=leases) as sessions:
        cancelled = asyncio.create_task(sessions.start("alice", Demo(DemoServer())))
        await store.granted_once.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(StoreUnavailable, match="the last lease of this session"):
            await sessions.start("alice", Demo(DemoServer()))
        store.may_answer.set()
        await free(leases)
        await sessions.start("alice", Demo(DemoServer()))


async def test_lease_released_during_the_check_of_its_holder_is_acquired() -> None:
    class ReleasedOnQuery(MemoryStore):
        async def held(self, key: str | None = None) -> Sequence[Held]:
            await other.release()
            return await super().held(key)

    async with Leases(ReleasedOnQuery()) as leases, Sessions(leases=leases) as sessions:
        found = await leases.acquire("sessions/alice", limit=1, owner="another process")
        assert found is not None
        other = found
        await sessions.connect("alice", Demo(DemoServer()))


async def test_late_loss_of_an_old_lease_does_not_end_the_link_of_a_new_one() -> None:
    server = DemoServer()
    now = [0.0]
    clock = Clock(lambda: time.monotonic() + now[0])
    async with (
        connect("memory://", clock=clock) as leases,
        Sessions(leases=leases, lease_ttl=SHORT, backoff=Backoff(0.01, 0.05)) as sessions,
    ):
        alice = await sessions.connect("alice", Demo(server))
        old = alice._runtime.lease
        assert old is not None
        (report_loss,) = old._callbacks
        # As after a pause of the process: the lease has expired, and its loss is not yet reported.
        now[0] = SHORT
        assert not old.live
        assert isinstance(await alice.send("bob", b"", outcome=True), NotSent)
        await alice.online(30)
        assert alice._runtime.lease is not old
        generation = alice.generation
        report_loss(LeaseLost("expired", key=old.key, reason="expired"))
        assert (alice.state, alice.generation) == ("online", generation)
        assert isinstance(await alice.send("bob", b""), Acked)


# -- after another process has held the lease --------------------------------------------------


async def revoke_lease(leases: Leases, session: Session) -> None:
    """Revoke the lease of a session in the store; the session does not know yet."""
    assert session._runtime.lease is not None
    assert await leases.revoke(session._runtime.lease.id, session._runtime.lease.key)


async def notice_lost_lease(session: Session) -> None:
    """Let the session notice that its lease is lost."""
    assert session._runtime.lease is not None
    with pytest.raises(LeaseLost):
        await session._runtime.lease.renew()


@pytest.mark.parametrize("client_id", ["{profile}", ""], ids=["named", "unnamed"])
async def test_sends_of_an_old_lease_are_not_written_after_those_of_the_next_owner(
    client_id: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        broker = stack.enter_context(Mosquitto(require_server("mosquitto")))
        arrived_ids = await stack.enter_async_context(subscriber(broker))
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", broker.port))
        leases = await stack.enter_async_context(connect("memory://"))
        one = await stack.enter_async_context(Sessions(leases=leases, backoff=Backoff(0.01, 0.05)))
        two = await stack.enter_async_context(Sessions(leases=leases))
        how: dict[str, Any] = {"subscribe": (), "client_id": client_id}

        first = await one.connect("alice", Mqtt(f"mqtt://127.0.0.1:{proxy.port}", **how))
        proxy.black_hole()
        old = asyncio.create_task(first.send("bob/1", b"old", outcome=True))
        await until(lambda: len(first._runtime.memory.inflight) == 1)
        await revoke_lease(leases, first)
        second = await two.connect("alice", Mqtt(broker.url(), **how))
        await notice_lost_lease(first)
        assert isinstance(await old, Unknown)
        await until(lambda: first.state == "offline/refused")
        assert isinstance(await second.send("bob/1", b"new"), Acked)
        await second.stop()

        proxy.heal()
        await first.connect()
        assert isinstance(await first.send("bob/1", b"newest"), Acked)
        await until(lambda: "newest" in arrived_ids)
        assert arrived_ids == ["new", "newest"]


async def test_regained_lease_does_not_force_a_clean_start() -> None:
    """The broker keeps messages for the session, which a clean start would discard."""
    got: list[object] = []

    def collect_messages(event: Incoming) -> None:
        if event.type == "messages_upsert":
            got.append(event.data.content)

    with Mosquitto(require_server("mosquitto")) as broker:
        async with (
            connect("memory://") as leases,
            Sessions(leases=leases, backoff=Backoff(0.01, 0.05)) as one,
            Sessions() as other,
        ):
            protocol = Mqtt(broker.url(), clean_start=True)
            alice = await one.connect("alice", protocol, on_event=collect_messages)
            bob = await other.connect("bob", Mqtt(broker.url(), subscribe=()))
            await revoke_lease(leases, alice)
            async with leases.exclusive("sessions/alice", owner="another process"):
                await notice_lost_lease(alice)
                await until(lambda: alice.state == "offline/refused")
                await bob.send("alice", b"while she was away")
            await alice.connect()
            await until(lambda: got)
            assert got == [b"while she was away"]


async def test_credentials_stored_by_the_next_owner_are_used(tmp_path: Path) -> None:
    server = DemoServer(pairing=True)
    storage = f"{tmp_path}/accounts.db"
    async with connect("memory://") as leases, Sessions(leases=leases, storage=storage) as one:
        await one._storage.new("alice")
        await one._storage.put("alice", "creds", "creds", server.add("alice"))
        first = await one.connect("alice", Demo(server))
        await revoke_lease(leases, first)
        async with Sessions(leases=leases, storage=storage) as two:
            await two._storage.put("alice", "creds", "creds", server.add("alice"))
            second = await two.connect("alice", Demo(server))
            await notice_lost_lease(first)
            await until(lambda: first.state == "offline/refused")
            assert second.state == "online"
        await first.connect()
        assert first.state == "online"


# -- links with unsent data ------------------------------------------------


@contextlib.asynccontextmanager
async def overloaded(leases: Leases | None = None) -> AsyncIterator[tuple[Session, FaultProxy]]:
    """Yield a session whose send buffer is full, and the proxy that stalls it."""
    async with (
        DemoServer() as server,
        FaultProxy("127.0.0.1", (await server.serve()).port) as proxy,
        Sessions(leases=leases) as sessions,
    ):
        session = await sessions.connect("alice", Demo(Tcp("127.0.0.1", proxy.port)))
        proxy.stall()
        body = b"x" * 100_000
        # The buffers of the kernel take some megabytes, more on some machines than on others.
        async with asyncio.timeout(30):
            while link_of(session).pending <= 1_000_000:
                await session.send("bob", body, wait=False)
                await asyncio.sleep(0.001)
        yield session, proxy


def link_of(session: Session) -> Transport:
    assert session._runtime.connection is not None
    assert session._runtime.connection.link is not None
    transport = session._runtime.connection.link.transport
    assert transport is not None
    return transport


@pytest.mark.parametrize("server_reads", [True, False])
async def test_lease_is_released_when_the_closed_link_can_send_nothing_more(
    server_reads: bool,
) -> None:
    async with connect("memory://") as leases, overloaded(leases) as (alice, proxy):
        link = link_of(alice)
        stopping = asyncio.create_task(alice.stop())
        await until(lambda: alice.state == "stopped")
        assert link.pending
        if server_reads:
            proxy.resume()
        await free(leases)
        assert not link.pending
        await stopping


async def test_new_link_aborts_a_closed_link_with_unsent_data() -> None:
    async with overloaded() as (alice, proxy):
        link = link_of(alice)
        await alice.disconnect()
        assert link.pending
        connecting = asyncio.create_task(alice.connect())
        # Long before the closing timeout of a closed link expires.
        await until(lambda: not link.pending, 3.0)
        proxy.resume()
        await connecting


async def test_lost_link_with_unsent_data_is_not_waited_for() -> None:
    class LostTransport:
        """A transport that has lost its socket, with unsent data."""

        keeps_bounds = False
        pending = 5

        def write(self, data: bytes) -> None:
            raise AssertionError("it is closed")

        def close(self) -> None:
            raise AssertionError("it is closed")

        abort = close

    closing_links = ClosingLinks()
    unused = cast(Any, None)
    link = Link(unused, unused, 1, unused)
    link.transport = LostTransport()
    link.lost(None)
    closing_links.closed(link)
    await asyncio.wait_for(closing_links.gone(2 * LIMIT), LIMIT)


async def test_lost_lease_aborts_a_closed_link_with_unsent_data() -> None:
    async with connect("memory://") as leases, overloaded(leases) as (alice, _):
        link = link_of(alice)
        await alice.disconnect()
        assert link.pending
        await revoke_lease(leases, alice)
        await notice_lost_lease(alice)
        assert not link.pending


# -- a store that is down at the start ---------------------------------------------------------


async def test_session_cannot_start_while_the_store_is_down(
    redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = DemoServer()
    async with FaultProxy("127.0.0.1", redis.port) as proxy:
        proxy.refuse()
        url = f"redis://127.0.0.1:{proxy.port}/0?prefix={tmp_path.name}"
        async with Sessions(leases=url) as sessions:
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await sessions.start("alice", Demo(server))
                assert not len(sessions)
            assert "refusing exclusive leases" in caplog.text
            proxy.heal()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await sessions.connect("alice", Demo(server))
                        break
                    except StoreUnavailable:
                        await asyncio.sleep(0.05)
            assert server.online == ["alice"]
