"""One session for a profile in the whole cluster, whatever befalls its process or the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import aiomqtt
import pytest
from tests.leases.redis_server import RedisServer
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

#: How long a lease lives without a sign of life of its holder, in seconds.
TTL = 3.0
#: The same, where nobody but this process needs time.
SHORT = 1.5


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as server:
        yield server


@pytest.fixture(params=["redis", "postgres"])
def leases_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place in a real store."""
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    return f"{request.getfixturevalue('redis').url}?prefix={tmp_path.name}"


class Account:
    """A process that has a session, or wants it."""

    def __init__(
        self,
        name: str,
        leases: str,
        port: int,
        *,
        insists: bool = False,
        send_window: int = 1000,
    ) -> None:
        self.name = name
        self._order = {
            "name": name,
            "leases": leases,
            "ttl": TTL,
            "broker": f"mqtt://127.0.0.1:{port}",
            "insists": insists,
            "send_window": send_window,
        }
        self.told: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, account.__file__, json.dumps(self._order), stdin=pipe, stdout=pipe
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.told.append(json.loads(line))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; it is our child, so the number is its own."""
        os.kill(self._process.pid, number)

    @property
    def pid(self) -> int:
        return self._process.pid

    def of(self, what: str) -> list[dict[str, Any]]:
        """What it has told of one kind."""
        return [each for each in self.told if each["what"] == what]

    async def tells(self, what: str, limit: float = 30.0, **data: Any) -> dict[str, Any]:
        """Wait until it tells this."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.of(what) if data.items() <= each.items()]

        await until(found, limit)
        return found()[0]

    async def finish(self) -> dict[str, str]:
        """Let it end; returns the outcome of each of its sends."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        done = await self.tells("done")
        outcomes = self.of("outcome")
        assert len(outcomes) == len({each["id"] for each in outcomes}) == done["sends"]
        assert done["status"]["sending"] == 0
        return {each["id"]: each["outcome"] for each in outcomes}


@contextlib.asynccontextmanager
async def listening(broker: Mosquitto) -> AsyncIterator[list[str]]:
    """The ids of all that comes to Bob, in order."""
    heard: list[str] = []
    ready = asyncio.Event()

    async def listen() -> None:
        v5 = aiomqtt.ProtocolVersion.V5
        async with aiomqtt.Client("127.0.0.1", broker.port, protocol=v5) as client:
            await client.subscribe("bob/+", qos=1)
            ready.set()
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                heard.append(message.payload.decode())

    task = asyncio.create_task(listen())
    try:
        await asyncio.wait_for(ready.wait(), 30)
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check(outcomes: dict[str, str], heard: list[str]) -> None:
    """What was said of each send is true."""
    for id, outcome in outcomes.items():
        if outcome == "Acked":
            assert id in heard
        elif outcome == "NotSent":
            assert id not in heard
        else:
            assert outcome == "Unknown"


async def test_one_session_for_a_profile_in_a_process() -> None:
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


async def test_one_session_for_a_profile_in_a_cluster_and_a_paused_one_sends_nothing_more(
    leases_url: str,
) -> None:
    with Mosquitto(require_server("mosquitto")) as broker:
        async with (
            listening(broker) as heard,
            FaultProxy("127.0.0.1", broker.port) as proxy,
            Account("first", leases_url, proxy.port, send_window=2) as first,
        ):
            # Acknowledgements come late, and make room for more: while it is paused, some do.
            proxy.latency(0.05, "down")
            fence = (await first.tells("online"))["fence"]
            await until(lambda: len(heard) > 20)
            async with Account("second", leases_url, broker.port, insists=True) as second:
                refusal = await second.tells("already running")
                assert f"pid {first.pid}" in refusal["error"]
                first.signal(signal.SIGSTOP)
                stopped_at = time.monotonic()
                taken = await second.tells("online", limit=3 * TTL + 10)
                assert taken["fence"] > fence
                assert time.monotonic() - stopped_at < 3 * TTL + 10
                await until(lambda: any(id.startswith("second") for id in heard))
                known = len(first.of("outcome"))
                first.signal(signal.SIGCONT)
                end = await first.tells("update", limit=3 * TTL + 10, kind="TAKEOVER")
                assert end["state"] == "offline/refused"
                assert f"pid {second.pid}" in end["reason"]
                outcomes = await first.finish()
                late = first.of("outcome")[known:]
                assert "NotSent" in [each["outcome"] for each in late], "it had none in its hands"
                seconds = await second.finish()
                assert set(seconds.values()) == {"Acked"}
                await until(lambda: set(seconds) <= set(heard))
            began = min(n for n, id in enumerate(heard) if id.startswith("second"))
            assert not [id for id in heard[began:] if id.startswith("first")]
            check(outcomes, heard)
            # It stays so: it does not come back by itself.
            (done,) = first.of("done")
            assert done["status"]["state"] == "offline/refused"
            assert not first.of("session_crashed")


class Sender:
    """Sends something every few milliseconds, from this process."""

    def __init__(self, sessions: Sessions) -> None:
        self._session = sessions.via("alice")
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Until somebody cancels it."""
        while True:
            self.outcomes.append(await self._session.send("bob", b"", outcome=True))
            await asyncio.sleep(0.005)


def break_store(proxy: FaultProxy, fault: str) -> None:
    """Make a store unavailable."""
    match fault:
        case "refused" | "refused, but not for long":
            proxy.refuse()
            proxy.reset()
        case "black hole":
            proxy.black_hole()
        case "deaf":
            # What it is asked for is done, but no answer comes: a renewal counts there, not here.
            proxy.cut_after(0, "down")


@pytest.mark.parametrize("fault", ["refused", "refused, but not for long", "black hole", "deaf"])
async def test_a_store_that_is_away_for_a_while(
    fault: str, redis: RedisServer, tmp_path: Path
) -> None:
    server = DemoServer()
    events: list[Incoming] = []
    async with FaultProxy("127.0.0.1", redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?prefix={tmp_path.name}"
        async with (
            connect(url, timeout=0.5, margin=0.5) as leases,
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
            # While the lease lives, it goes on.
            await until(lambda: len(sender.outcomes) > before + 10)
            assert alice.state == "online"
            assert all(isinstance(each, Acked) for each in sender.outcomes)
            # Before another could have it, it stops.
            await until(lambda: alice.state != "online", 3 * SHORT)
            assert lease.deadline < broken_at + SHORT
            await asyncio.sleep(0)
            count = len(server.received)
            told = len(sender.outcomes)
            if "not for long" not in fault:
                await until(lambda: len(sender.outcomes) > told + 20)
                assert len(server.received) == count
                assert all(isinstance(each, NotSent) for each in sender.outcomes[told:])

            # When the store is back, so is the session, and nobody has to do anything; even if
            # the store has its last lease still, which nobody else can have had meanwhile.
            proxy.heal()
            await until(lambda: alice.state == "online")
            assert alice.fence is not None
            assert alice.fence > fence
            told = len(sender.outcomes)
            await until(lambda: len(sender.outcomes) > told + 10)
            assert isinstance(sender.outcomes[-1], Acked)
            sending.cancel()
            arrived = {each.id for each in server.received}
            for outcome in sender.outcomes:
                assert isinstance(outcome, Unknown) or isinstance(outcome, Acked) == (
                    outcome.id in arrived
                )
            kinds = {event.data.kind for event in events if event.type == "connection_update"}
            assert CloseClass.TAKEOVER not in kinds


async def test_a_lease_of_its_own_that_the_store_still_has_is_no_takeover() -> None:
    server = DemoServer()
    async with (
        connect("memory://") as leases,
        Sessions(leases=leases, lease_ttl=SHORT, backoff=Backoff(0.01, 0.05)) as sessions,
    ):
        alice = await sessions.connect("alice", Demo(server))
        lease = alice._runtime.lease
        assert lease is not None
        # As if the answer to a request of ours had been lost, and another lease with it.
        assert await leases.revoke(lease.id, lease.key)
        ghost = await leases.acquire(lease.key, limit=1, ttl=SHORT, owner=lease.owner)
        assert ghost is not None
        with pytest.raises(LeaseLost):
            await lease.renew()
        await until(lambda: "its own last lease" in alice.status()["reason"])
        assert isinstance(await alice.send("bob", b"", outcome=True), NotSent)
        await ghost.release()
        await alice.online(3 * SHORT)
        assert isinstance(await alice.send("bob", b""), Acked)


async def free(leases: Leases) -> None:
    """Wait until nobody has a lease."""
    async with asyncio.timeout(30):
        while await leases.held():  # noqa: ASYNC110 (a store tells nobody)
            await asyncio.sleep(0.001)


class Slow(MemoryStore):
    """A store that does not say that it has given the first lease, and is slow to take it back."""

    def __init__(self) -> None:
        super().__init__()
        self.given = asyncio.Event()
        self.may_take = asyncio.Event()

    async def acquire(self, request: Request) -> Grant | None:
        granted = await super().acquire(request)
        if not self.given.is_set():
            self.given.set()
            await self.may_take.wait()
        return granted

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        await self.may_take.wait()
        return await super().release(requests)


async def test_a_start_that_was_given_up_is_not_running() -> None:
    store = Slow()
    async with Leases(store) as leases, Sessions(leases=leases) as sessions:
        given_up = asyncio.create_task(sessions.start("alice", Demo(DemoServer())))
        await store.given.wait()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        with pytest.raises(StoreUnavailable, match="its own last lease"):
            await sessions.start("alice", Demo(DemoServer()))
        store.may_take.set()
        await free(leases)
        await sessions.start("alice", Demo(DemoServer()))


async def test_a_lease_that_is_free_again_when_it_is_looked_at_is_taken() -> None:
    class Hasty(MemoryStore):
        async def held(self, key: str | None = None) -> Sequence[Held]:
            await other.release()
            return await super().held(key)

    async with Leases(Hasty()) as leases, Sessions(leases=leases) as sessions:
        found = await leases.acquire("sessions/alice", limit=1, owner="somebody")
        assert found is not None
        other = found
        await sessions.connect("alice", Demo(DemoServer()))


async def test_the_end_of_an_old_lease_does_not_end_the_link_of_a_new_one() -> None:
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
        (tell,) = old._callbacks
        # As after a pause of the whole process: the lease is over, and nobody was told yet.
        now[0] = SHORT
        assert not old.live
        assert isinstance(await alice.send("bob", b"", outcome=True), NotSent)
        await alice.online(30)
        assert alice._runtime.lease is not old
        generation = alice.generation
        tell(LeaseLost("it is over", key=old.key, reason="expired"))
        assert (alice.state, alice.generation) == ("online", generation)
        assert isinstance(await alice.send("bob", b""), Acked)


# -- when the lease has been somebody else's ---------------------------------------------------


async def revoked(leases: Leases, session: Session) -> None:
    """Let the store give the lease of a session to whoever wants it; the session learns later."""
    assert session._runtime.lease is not None
    assert await leases.revoke(session._runtime.lease.id, session._runtime.lease.key)


async def learns_of_it(session: Session) -> None:
    """Its lease is gone, and now it knows."""
    assert session._runtime.lease is not None
    with pytest.raises(LeaseLost):
        await session._runtime.lease.renew()


@pytest.mark.parametrize("client_id", ["{profile}", ""], ids=["named", "unnamed"])
async def test_what_was_sent_under_an_old_lease_does_not_follow_what_the_next_owner_sent(
    client_id: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        broker = stack.enter_context(Mosquitto(require_server("mosquitto")))
        heard = await stack.enter_async_context(listening(broker))
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", broker.port))
        leases = await stack.enter_async_context(connect("memory://"))
        one = await stack.enter_async_context(Sessions(leases=leases, backoff=Backoff(0.01, 0.05)))
        two = await stack.enter_async_context(Sessions(leases=leases))
        how: dict[str, Any] = {"subscribe": (), "client_id": client_id}

        first = await one.connect("alice", Mqtt(f"mqtt://127.0.0.1:{proxy.port}", **how))
        proxy.black_hole()
        old = asyncio.create_task(first.send("bob/1", b"old", outcome=True))
        await until(lambda: len(first._runtime.memory.inflight) == 1)
        await revoked(leases, first)
        second = await two.connect("alice", Mqtt(broker.url(), **how))
        await learns_of_it(first)
        assert isinstance(await old, Unknown)
        await until(lambda: first.state == "offline/refused")
        assert isinstance(await second.send("bob/1", b"new"), Acked)
        await second.stop()

        proxy.heal()
        await first.connect()
        assert isinstance(await first.send("bob/1", b"newest"), Acked)
        await until(lambda: "newest" in heard)
        assert heard == ["new", "newest"]


async def test_a_lease_that_is_had_again_is_no_clean_start() -> None:
    """Nobody else has had it, perhaps: what the broker has kept is not thrown away."""
    got: list[object] = []

    def hears(event: Incoming) -> None:
        if event.type == "messages_upsert":
            got.append(event.data.content)

    with Mosquitto(require_server("mosquitto")) as broker:
        async with (
            connect("memory://") as leases,
            Sessions(leases=leases, backoff=Backoff(0.01, 0.05)) as one,
            Sessions() as other,
        ):
            protocol = Mqtt(broker.url(), clean_start=True)
            alice = await one.connect("alice", protocol, on_event=hears)
            bob = await other.connect("bob", Mqtt(broker.url(), subscribe=()))
            await revoked(leases, alice)
            async with leases.exclusive("sessions/alice", owner="somebody"):
                await learns_of_it(alice)
                await until(lambda: alice.state == "offline/refused")
                await bob.send("alice", b"while she was away")
            await alice.connect()
            await until(lambda: got)
            assert got == [b"while she was away"]


async def test_credentials_of_the_next_owner_are_not_ignored(tmp_path: Path) -> None:
    server = DemoServer(pairing=True)
    storage = f"{tmp_path}/accounts.db"
    async with connect("memory://") as leases, Sessions(leases=leases, storage=storage) as one:
        await one._storage.new("alice")
        await one._storage.put("alice", "creds", "creds", server.add("alice"))
        first = await one.connect("alice", Demo(server))
        await revoked(leases, first)
        async with Sessions(leases=leases, storage=storage) as two:
            await two._storage.put("alice", "creds", "creds", server.add("alice"))
            second = await two.connect("alice", Demo(server))
            await learns_of_it(first)
            await until(lambda: first.state == "offline/refused")
            assert second.state == "online"
        await first.connect()
        assert first.state == "online"


# -- a server that is slow to take what is left ------------------------------------------------


@contextlib.asynccontextmanager
async def overloaded(leases: Leases | None = None) -> AsyncIterator[tuple[Session, FaultProxy]]:
    """A session that has more to send than it gets rid of."""
    async with (
        DemoServer() as server,
        FaultProxy("127.0.0.1", (await server.serve()).port) as proxy,
        Sessions(leases=leases) as sessions,
    ):
        session = await sessions.connect("alice", Demo(Tcp("127.0.0.1", proxy.port)))
        proxy.stall()
        body = b"x" * 100_000
        for _ in range(60):
            await session.send("bob", body, wait=False)
        await until(lambda: link_of(session).pending > 1_000_000)
        yield session, proxy


def link_of(session: Session) -> Transport:
    assert session._runtime.connection is not None
    assert session._runtime.connection.link is not None
    transport = session._runtime.connection.link.transport
    assert transport is not None
    return transport


@pytest.mark.parametrize("takes_it", [True, False])
async def test_a_lease_is_given_back_when_nothing_more_can_be_sent(takes_it: bool) -> None:
    async with connect("memory://") as leases, overloaded(leases) as (alice, proxy):
        link = link_of(alice)
        stopping = asyncio.create_task(alice.stop())
        await until(lambda: alice.state == "stopped")
        assert link.pending
        if takes_it:
            proxy.resume()
        await free(leases)
        assert not link.pending
        await stopping


async def test_a_new_link_ends_one_that_was_closed_before() -> None:
    async with overloaded() as (alice, proxy):
        link = link_of(alice)
        await alice.disconnect()
        assert link.pending
        connecting = asyncio.create_task(alice.connect())
        # Long before the time is over that a closed link has.
        await until(lambda: not link.pending, 3.0)
        proxy.resume()
        await connecting


async def test_a_link_that_is_gone_is_not_waited_for() -> None:
    class Backlog:
        """A transport that has lost its socket, and still has something to send."""

        keeps_bounds = False
        pending = 5

        def write(self, data: bytes) -> None:
            raise AssertionError("it is closed")

        def close(self) -> None:
            raise AssertionError("it is closed")

        abort = close

    parting = ClosingLinks()
    nobody = cast(Any, None)
    link = Link(nobody, nobody, 1, nobody)
    link.transport = Backlog()
    link.lost(None)
    parting.closed(link)
    await asyncio.wait_for(parting.gone(2 * LIMIT), LIMIT)


async def test_a_lost_lease_ends_a_link_that_was_closed_before() -> None:
    async with connect("memory://") as leases, overloaded(leases) as (alice, _):
        link = link_of(alice)
        await alice.disconnect()
        assert link.pending
        await revoked(leases, alice)
        await learns_of_it(alice)
        assert not link.pending


# -- a store that is away at the start ---------------------------------------------------------


async def test_a_session_is_not_started_while_the_store_is_away(
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
