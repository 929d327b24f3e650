"""A process that is paused until its lease has expired writes nothing when it continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.reached import assert_reached

from moored.kernel import Backoff
from moored.leases import connect
from moored.sessions import (
    Acked,
    NotSent,
    Outcome,
    Outgoing,
    Session,
    Sessions,
    StepFailed,
    StorageError,
    Tcp,
    Unknown,
)
from moored.sessions._runtime import SessionRuntime
from moored.sessions.link._link import Link
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.transport._transport import Receiver, Transport
from moored.testing import Mutant, Sim, assert_caught, mutant, scaled, simulate
from moored.testing.demo import Demo, DemoServer

TTL = 3.0
SENDS = 60


class World:
    """One session with a lease, and the writes that it makes without one."""

    def __init__(self, sim: Sim, server: DemoServer) -> None:
        self.sim = sim
        self.server = server
        self.host = sim.host("client")
        self.session: Session | None = None
        self.outcomes: dict[str, Outcome] = {}
        #: Writes to the link or the storage without a valid lease.
        self.illegal: list[str] = []
        #: How often each condition of the checks was reached.
        self.reached: Counter[str] = Counter()

    def write(self, what: str) -> None:
        lease = None if self.session is None else self.session._runtime.lease
        self.reached["a write with a lease"] += lease is not None
        # (The deadline, and not `live`, which a planted defect may have changed.)
        if lease is not None and lease.deadline <= self.sim.now:
            self.illegal.append(f"{what} at {self.sim.now}, and the lease ended {lease.deadline}")


class CheckedTransport:
    """A transport that checks the lease at each write."""

    keeps_bounds = False

    def __init__(self, inner: Transport, world: World) -> None:
        self._inner = inner
        self._world = world

    def write(self, data: bytes) -> None:
        self._world.write(f"{len(data)} bytes were written")
        self._inner.write(data)

    @property
    def pending(self) -> int:
        return self._inner.pending

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class CheckedEndpoint:
    """An endpoint with such transports."""

    def __init__(self, world: World) -> None:
        self._inner = Tcp("server", 7)
        self._world = world

    async def dial(self, receiver: Receiver) -> Transport:
        return CheckedTransport(await self._inner.dial(receiver), self._world)

    def __str__(self) -> str:
        return str(self._inner)


class CheckedStorage(MemoryStorage):
    """A storage that checks the lease at each write."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        self._world.write("a record was written")
        await super().put(profile, namespace, key, value)


async def _count(outgoing: Outgoing, session: Any) -> Outgoing:
    """A step that changes a record for each send, as a ratchet does."""
    try:
        await session.records.update("session", "bob", lambda old: b"%d" % (int(old or b"0") + 1))
    except StorageError as error:
        raise StepFailed(str(error)) from error
    return outgoing


async def _send(world: World, session: Session, id: str) -> None:
    world.outcomes[id] = await session.send("bob", b"", id=id, timeout=4.0, outcome=True)


async def _client(world: World) -> None:
    sim = world.sim
    protocol = Demo(CheckedEndpoint(world), keepalive=1.0, patience=2.0)
    steps = [("count", _count)] if sim.rng.random() < 0.5 else []
    async with (
        connect("memory://") as leases,
        Sessions(
            leases=leases, lease_ttl=TTL, backoff=Backoff(0.1, 0.5), storage=CheckedStorage(world)
        ) as sessions,
    ):
        world.session = session = await sessions.connect("ann", protocol, steps=steps)
        sends = []
        stops = {sim.rng.randrange(SENDS) for _ in range(2)}
        for number in range(SENDS):
            sends.append(asyncio.create_task(_send(world, session, str(number))))
            if number in stops:
                # In the loop iteration of the send, or a little later.
                await asyncio.sleep(sim.rng.choice([0.0, 0.0, 0.02]))
                world.host.pause()
            await asyncio.sleep(sim.rng.choice([0.0, 0.01, 0.2]))
        await asyncio.gather(*sends)
        await session.online(30.0)
        await _send(world, session, "last")


async def paused(sim: Sim) -> Counter[str]:
    """Pause the client for longer than its lease, and continue it."""
    server = DemoServer(rng=sim.rng)
    listening, finished = (asyncio.get_running_loop().create_future() for _ in range(2))
    world = World(sim, server)

    async def serve() -> None:
        await server.serve("server", 7)
        listening.set_result(None)
        await asyncio.get_running_loop().create_future()

    async def client() -> None:
        await _client(world)
        finished.set_result(None)

    sim.host("server", serve)
    await listening
    world.host = sim.host("client", client)
    while not finished.done():
        await asyncio.sleep(0.1)
        if world.host.paused:
            await asyncio.sleep(sim.random(0.5, 3.0) * TTL)
            lease = None if world.session is None else world.session._runtime.lease
            expired = lease is not None and lease.deadline <= sim.now
            world.reached["it continued without its lease"] += expired
            world.host.resume()
    assert not world.illegal, world.illegal[0]
    received = {each.id for each in server.received}
    for id, outcome in world.outcomes.items():
        assert isinstance(outcome, Acked | NotSent | Unknown)
        assert isinstance(outcome, Unknown) or (id in received) == isinstance(outcome, Acked)
        world.reached[type(outcome).__name__] += 1
    assert isinstance(world.outcomes["last"], Acked)
    return world.reached


def test_paused_process_writes_nothing_after_its_lease_has_expired() -> None:
    simulate(paused, seeds=scaled(500, least=12))


def test_the_schedules_reach_every_condition_of_the_checks() -> None:
    wanted = {"a write with a lease", "it continued without its lease"}
    assert_reached(paused, wanted | {"Acked", "NotSent", "Unknown"}, within=20)


def _push_anyway(self: Link) -> None:
    out, self._out = self._out, None
    if out and not self.ended and self.transport is not None:
        self.transport.write(b"".join(out))


@pytest.mark.parametrize(
    "planted",
    [
        mutant(Link, "push", _push_anyway, name="bytes are written without a lease"),
        mutant(
            SessionRuntime,
            "_has_lease",
            lambda self: True,
            name="records are written without a lease",
        ),
    ],
    ids=lambda each: each.name,
)
def test_mutants_are_caught(planted: Mutant) -> None:
    assert_caught(paused, planted, within=200, clean=0)
