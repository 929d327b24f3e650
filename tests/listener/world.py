"""A simulated server of notifications, its faults, and subscribers that check for silent losses.

Above the seams everything is the real code: the listener, its supervisor, core, canary and
subscriptions. A session passes messages on in order, also after the listener has closed it: a
message of an old connection must have no effect.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

from moored.postgres.listen import Gap, Listener, Notification, Subscription, _listener
from moored.postgres.listen._direct import DirectConnection, Receive
from moored.postgres.server import Resolver
from moored.testing import Sim

__all__ = ["Server", "World", "seams"]

CHANNELS = ("a", "b", "c")
TROUBLE, QUIET = 45.0, 20.0
LATENCY = (0.0005, 0.02)
FAULTS = ("kill", "go_silent", "lag", "silent", "refuse", "pool fails", "pool hangs")
_NOTIFY = re.compile(r"SELECT pg_notify\(E'(.*)', E'(.*)'\)")

_worlds: list[World] = []


class Session(DirectConnection):
    """One connection, as the server and the network see it."""

    def __init__(self, server: Server, receive: Receive) -> None:
        super().__init__(receive)
        self.server = server
        server.opened += 1
        self.pid = server.opened
        self.listened: set[str] = set()
        self.ended = self.closed = False
        self.silent_since: float | None = None
        self._free_at = self._lag = 0.0
        self._due: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def _later(self, action: Any, *args: Any) -> None:
        """Act after a delay, in the order of the calls; never if the link is silent."""
        sim = self.server.sim
        self._free_at = max(self._free_at, sim.now + self._lag + sim.random(*LATENCY))
        self._due.append((action, args))
        sim.at(self._free_at, self._next)

    def _next(self) -> None:
        action, args = self._due.popleft()  # timers are inexact, but bytes keep their order
        if self.silent_since is None:
            action(*args)

    def _send(self, sql: bytes) -> None:
        if self.ended and self.server.sim.random(0.0, 1.0) < 0.5:
            self._fail(BrokenPipeError(errno.EPIPE, "broken pipe"))
        self._later(self._execute, sql.decode())

    def _execute(self, sql: str) -> None:
        if self.ended:
            return
        value = None
        for statement in sql.split("; "):
            word, _, rest = statement.partition(" ")
            if word == "LISTEN":
                self.listened.add(rest.strip('"'))
            elif word == "UNLISTEN":
                self.listened.discard(rest.strip('"'))
            elif "queue" in rest:
                value = b"0.0"
            else:
                value = str(self.pid).encode()
        self._later(self._answered, value)

    def _answered(self, value: bytes | None) -> None:
        self._arrived(None)
        self._settle(value)

    def push(self, notification: Notification) -> None:
        """Send a notification to the client."""
        self._later(self._arrived, notification)

    def _arrived(self, notification: Notification | None) -> None:
        self._reads += 1
        self._notifications += notification is not None
        self._receive(notification)

    def kill(self) -> None:
        """End the session: the client notices when everything before has arrived."""
        if not self.ended:
            self.ended = True
            self._later(self._fail, ConnectionResetError(errno.ECONNRESET, "connection reset"))

    def go_silent(self) -> None:
        """Nothing arrives any more, in either direction."""
        self.silent_since = self.silent_since or self.server.sim.now

    def lag(self) -> None:
        """From now on, everything arrives late, perhaps when there is another connection."""
        self._lag = self.server.sim.random(2.0, 8.0)

    def _read_late(self) -> None:
        pass

    def _finish(self) -> None:
        self.closed = self.ended = True


class Server:
    """Sessions, and the numbers of notifications that were committed on each channel."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.opened = 0
        self.sessions: list[Session] = []
        self.committed: Counter[str] = Counter()
        self.down: str | None = None
        self.pool_down: str | None = None

    async def connect(self, receive: Receive) -> DirectConnection:
        """Accept a connection, refuse it, or leave the client waiting."""
        await asyncio.sleep(self.sim.random(*LATENCY))
        if self.down == "silent":
            await asyncio.sleep(3.0)
            raise TimeoutError("connection timeout expired")
        if self.down is not None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        session = Session(self, receive)
        self.sessions.append(session)
        return session

    def commit(self, channel: str, payload: str | None = None) -> None:
        """Commit a transaction with one notification; by default with the channel's next number."""
        if payload is None:
            self.committed[channel] += 1
        for session in self.sessions:
            if channel in session.listened and not session.ended:
                text = payload or f"{session.pid} {self.committed[channel]}"
                session.push(Notification(channel, text, 1))

    def stop(self, how: str, seconds: float) -> None:
        """Be down for so long: "silent", or refusing connections."""
        self.down = how
        for session in self.sessions:
            session.go_silent() if how == "silent" else session.kill()
        self.sim.after(seconds, self._start)

    def _start(self) -> None:
        self.down = None

    def stop_pool(self, how: str, seconds: float) -> None:
        """Let the pooled path fail, or hang."""
        self.pool_down = how
        self.sim.after(seconds, self._start_pool)

    def _start_pool(self) -> None:
        self.pool_down = None

    @asynccontextmanager
    async def connection(self, timeout: float = 30.0) -> AsyncIterator[Any]:
        """A connection of the pool."""
        await asyncio.sleep(self.sim.random(*LATENCY))
        if self.down is not None or self.pool_down == "fails":
            raise ConnectionRefusedError("the pool has no connection")
        if self.pool_down == "hangs":
            await asyncio.sleep(20.0)
        yield self

    async def execute(self, sql: str) -> None:
        """Execute pg_notify()."""
        found = _NOTIFY.fullmatch(sql)
        assert found, sql
        self.commit(found[1], found[2])
        await asyncio.sleep(self.sim.random(*LATENCY))


class Reader:
    """One subscription after the other, each checked for what it was not told."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.saw: Counter[str] = Counter()
        #: For each channel, the last number received, and the last that need not be received.
        self.last: Counter[str] = Counter()
        self.covered: Counter[str] = Counter()
        self.session = 0
        self.events: Subscription | None = None

    async def run(self) -> None:
        """Subscribe, read, and now and then leave, be cancelled or change the channels."""
        sim = self.world.sim
        while True:
            life = None if sim.now > TROUBLE else min(sim.random(1.0, 30.0), TROUBLE + 1 - sim.now)
            try:
                async with asyncio.timeout(life):
                    await self._read()
            except TimeoutError:
                self.saw["left"] += 1
            await asyncio.sleep(sim.random(0.0, 1.0))

    async def _read(self) -> None:
        world, rng = self.world, self.world.sim.rng
        some = rng.sample(CHANNELS, rng.randint(1, 3))
        buffer = rng.choice((3, 1000))
        async with world.listener.subscribe(*some, buffer=buffer) as events:
            self.events = events
            self.last.clear()
            self._catch_up()
            if not world.listener.up:
                self.session = 0
            async for event in events:
                self._check(event, events.channels)
                if rng.random() < 0.05 and world.sim.now < TROUBLE:
                    await self._change(events)
                if rng.random() < 0.1 and world.sim.now < TROUBLE:
                    await asyncio.sleep(rng.uniform(0.0, 2.0))

    async def _change(self, events: Any) -> None:
        channel = self.world.sim.rng.choice(CHANNELS)
        if channel not in events.channels:
            await events.listen(channel)
            # From now on, the listener is up or a gap is due.
            self.covered[channel] = max(self.covered[channel], self.world.server.committed[channel])
            self.last[channel] = 0
        elif len(events.channels) > 1:
            await events.unlisten(channel)
            self.last[channel] = 0

    def _catch_up(self) -> None:
        """Read again what was announced: nothing up to now has to be delivered any more."""
        self.covered = Counter(self.world.server.committed)
        self.session = 0

    def _check(self, event: Notification | Gap, channels: frozenset[str]) -> None:
        if isinstance(event, Gap):
            self.saw["slow" if event.reason == "slow" else "gap"] += 1
            assert event.since <= self.world.wall(), "a gap begins in the future"
            self._catch_up()
            return
        if event.channel not in channels:
            return  # it was buffered before unlisten()
        self.saw["notification"] += 1
        session, number = map(int, event.payload.split())
        assert self.session in (0, session), f"{event} of another connection, without a gap"
        self.session = session
        last = self.last[event.channel]
        assert number > last, f"{event} after {last}"
        reached = max(last, self.covered[event.channel])
        assert number <= reached + 1, f"{self.name} missed {reached + 1} silently: {event}"
        self.last[event.channel] = number

    def assert_complete(self) -> None:
        """Everything that was committed has arrived, or was covered by a gap."""
        assert self.events is not None
        for channel in self.events.channels:
            reached = max(self.last[channel], self.covered[channel])
            assert reached == self.world.server.committed[channel], f"{self.name} at {reached}"


class World:
    """One listener, its subscribers, and a bad day."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.server = Server(sim)
        self.listener = Listener("postgresql://sim/db", notify_through=self.server)
        self.readers = [Reader(self, f"reader {number}") for number in range(3)]
        self.saw: Counter[str] = Counter()

    def wall(self) -> float:
        return self.listener._clock.wall()

    async def run(self) -> Counter[str]:
        """Run the day; return what was seen."""
        sim = self.sim
        self._plan_faults()
        saw = self.saw
        async with self.listener:
            tasks = [asyncio.create_task(reader.run()) for reader in self.readers]
            tasks += [asyncio.create_task(self._publish()), asyncio.create_task(self._watch())]
            await asyncio.sleep(TROUBLE + QUIET - sim.now)
            for task in tasks:
                assert not task.done() or task.exception() is None, task.exception()
            assert self.listener.up, f"{self.listener._core!r} {QUIET} s after the last fault"
            for channel in CHANNELS:
                self.server.commit(channel)
            await asyncio.sleep(10.0)
            for reader in self.readers:
                reader.assert_complete()
            for task in tasks:
                task.cancel()
            done, _ = await asyncio.wait(tasks)
            for task in done:
                if not task.cancelled() and (error := task.exception()):
                    raise error
        saw["reconnects"] = self.listener.statistics()["reconnects"]
        saw["failed series"] = self.listener._core.failed_series
        return sum((reader.saw for reader in self.readers), saw)

    async def _publish(self) -> None:
        while self.sim.now < TROUBLE + QUIET - 5.0:
            await asyncio.sleep(self.sim.random(0.01, 0.6))
            self.server.commit(self.sim.rng.choice(CHANNELS))

    def _plan_faults(self) -> None:
        sim, server = self.sim, self.server
        at = sim.random(0.0, 3.0)
        while at < TROUBLE - 10.0:
            kind = sim.rng.choice(FAULTS)
            lasts = min(sim.rng.choice((0.2, 3.0, 25.0)), TROUBLE - at)
            if kind in ("silent", "refuse"):
                sim.at(at, server.stop, kind, lasts)
            elif kind.startswith("pool"):
                sim.at(at, server.stop_pool, kind.split()[1], lasts)
            else:
                sim.at(at, self._break, kind)
            at += sim.random(0.0, 10.0)

    def _break(self, kind: str) -> None:
        """Kill the last session, or let its messages arrive late, or never."""
        for session in self.server.sessions[-1:]:
            getattr(session, kind)()

    async def _watch(self) -> None:
        """Check every half second what must always be true."""
        core = self.listener._core
        while True:
            await asyncio.sleep(0.5)
            now = self.sim.now
            for session in self.server.sessions:
                if session.silent_since is not None and not session.closed:
                    self.saw["silent link"] += 1
                    assert now - session.silent_since <= 10.0, "a dead connection is not noticed"
            link = core.link
            if link.is_up:
                continue
            self.saw["connects" if link.next_dial_at is None else "waits"] += 1
            if link.next_dial_at is None:
                assert link.machine.at("connecting"), core
                assert now - link.machine.since <= 15.0, f"{core} hangs"
            else:
                assert link.machine.at("down", "dialing"), core
                assert link.next_dial_at - now <= 12.0, core


@contextmanager
def seams() -> Iterator[None]:
    """The simulated server in the place of libpq and of the resolver."""

    async def open_direct(conninfo: str, receive: Receive) -> DirectConnection:
        return await _worlds[-1].server.connect(receive)

    async def conninfo(self: object, url: str) -> str:
        return url

    with (
        mock.patch.object(_listener, "open_direct", open_direct),
        mock.patch.object(Resolver, "conninfo", conninfo),
    ):
        yield


async def a_bad_day(sim: Sim) -> Counter[str]:
    """One schedule."""
    _worlds[:] = [World(sim)]
    return await _worlds[-1].run()
