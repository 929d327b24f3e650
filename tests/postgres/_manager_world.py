"""Several instances of `Postgres` that compete for one scripted server, and injected faults.

Everything above the seams is the real code: the tree, the manager and its core, the replication
client, the hub with its file, the restarter. The invariants are in `_manager_watcher`, the
replacements of I/O in `_manager_seams`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moored.kernel import WaitTimeout
from moored.postgres import Changes, Postgres, Reset, Transaction
from moored.postgres._errors import ConfigurationError, PostgresError, StateError
from moored.postgres.consume._store import StateStore
from moored.testing import Host, Sim

from ._manager_watcher import Ledger, Seat, Watcher, brief
from .scripted_server import Server, Session

__all__ = ["Instance", "KeptStore", "World"]

TROUBLE_UNTIL = 40.0
#: After the last trouble, the longest chain: a lost connection lingers, its lock is broken, the
#: longest wait between tries, and one more of each.
SETTLED_AFTER = 150.0
SHUTDOWN = 10.0


class Instance:
    """One machine: its host, its file, its consumers, and what is known of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        first = world.instances[0] if world.instances else None
        self.store: KeptStore = (
            first.store if first is not None and world.shared else KeptStore(world)
        )
        #: Its consumers, those that are here.
        self.seats: dict[str, Seat] = {}
        self.pg: Postgres | None = None
        #: The connection with which it last got the lock, and since when that is not so.
        self.locked_by: Session | None = None
        self.wrong_since: float | None = None
        self.failures = 0
        #: Whether this process was ever active, and what has worked: its client, and its pools.
        self.was_active = False
        self.worked: set[str] = set()
        self.opened = False
        self.closing = False
        self.napping = False
        self.host: Host = world.sim.host(name, self.main)

    @property
    def url(self) -> str:
        return f"postgresql://{self.name}@/db?host=/sim"

    @property
    def session(self) -> Session | None:
        """The replication connection of its present client."""
        manager = None if self.pg is None else self.pg._restarter.manager
        client = None if manager is None else manager.client
        link: Any = None if client is None else client._link
        return None if link is None else link._session

    @property
    def fatal(self) -> bool:
        return self.pg is not None and self.pg.fatal is not None

    @property
    def running(self) -> bool:
        """Whether the instance is open and can be used."""
        there = self.host.alive and not self.host.paused
        return there and self.opened and not (self.closing or self.napping or self.fatal)

    def restart(self) -> None:
        """A new process, with the file of the last one; what that one left ends with it."""
        for session in self.sessions():
            self.world.server.end_session(session)
        self.pg, self.opened, self.closing, self.napping = None, False, False, False
        self.host.restart()

    async def main(self) -> None:
        self.locked_by = self.wrong_since = None
        self.failures = 0
        self.was_active = False
        self.worked.clear()
        self.seats.clear()
        self.pg = pg = Postgres(
            self.url,
            stream_id="sim",
            state_dir=self.name,
            pool_size=2,
            connect_timeout=5.0,
            shutdown_timeout=SHUTDOWN,
            application_name=self.name,
        )
        await pg.open()
        # With few transactions kept, a consumer that comes back needs a new stream.
        pg._hub.pressure.queue_length = self.world.rng.choice((1, 10_000))
        self.opened = True
        watcher = self.world.watcher
        pg.machine.observe(lambda move: watcher.moved(self, move))
        pg.monitor.subscribe(lambda change: watcher.status_changed(self))
        await asyncio.gather(*(self._consume(pg, name) for name in self.store.names))

    # -- consumers -----------------------------------------------------------------------------

    async def _consume(self, pg: Postgres, name: str) -> None:
        """Take and acknowledge; now and then crash with something in hand, and come back."""
        rng = self.world.rng
        while not self.closing and not self.fatal:
            try:
                changes, seat = self._attach(pg, name)
            except StateError:
                await asyncio.sleep(1.0)
                continue
            lifetime = None if self.world.calm else rng.choice((None, 3.0, 12.0))
            try:
                async with changes, asyncio.timeout(lifetime):
                    async for item in changes:
                        self._take(seat, item)
                    return
            except (TimeoutError, StateError):
                self.world.saw["a consumer crashed"] += 1
                await asyncio.sleep(rng.choice((0.0, 0.5, 4.0)))
            except ConfigurationError:
                return

    def _attach(self, pg: Postgres, name: str) -> tuple[Changes, Seat]:
        store = self.store
        known = name in store.ledgers
        changes = pg.changes(name)
        ledger = store.ledgers.setdefault(name, Ledger(name))
        saved = store.load().consumers[name]
        if not known:
            ledger.owed = saved.acknowledged
        self.seats[name] = seat = Seat(ledger)
        seat.must_hear = saved.reset is not None
        return changes, seat

    def _take(self, seat: Seat, item: Transaction | Reset) -> None:
        if isinstance(item, Reset):
            self.world.saw["a reset was told"] += 1
            seat.heard()
            # What came before it was told is in the copy that it makes now.
            assert self.pg is not None
            known = self.pg._hub._known.get(seat.ledger.name)
            progress = None if known is None else known.progress
            if progress is not None and seat.ledger.owed is not None:
                # Whatever the hub believes, the copy holds nothing that is written after it.
                begins = min(progress.acknowledged, self.world.server.end)
                seat.ledger.owed = max(seat.ledger.owed, begins)
            return
        end = item.position.lsn
        self.world.watcher.given(self, seat, end)
        rng = self.world.rng
        delay = rng.choice((0.0, 0.05, 0.3)) if self.world.calm else rng.choice((0.0, 0.3, 2, 6))

        async def acknowledge() -> None:
            await asyncio.sleep(delay)
            seat.ledger.acked.add(end)
            await item.ack()

        self.world.keep(asyncio.get_running_loop().create_task(acknowledge()))

    # -- orders --------------------------------------------------------------------------------

    async def close(self, how: str = "close") -> None:
        """Stop it as its user would; it must end in time, and leave nothing behind."""
        if not self.running:
            return
        assert self.pg is not None
        self.closing = True
        pg, process = self.pg, self.host.process
        begin = self.world.sim.now
        try:
            await self.host.run(getattr(pg, how)())
        except (WaitTimeout, PostgresError):
            # It could not wake up, or not reach what it was to drop, and says so.
            if how != "drop":
                raise
            await self.host.run(pg.close())
        except Exception as error:
            if process.alive:
                self.world.violated(f"{self.name}: {how} failed: {error!r}")
            return
        extra = 10.0 + SHUTDOWN if how == "drop" else 0.0
        took = self.world.sim.now - begin
        if took > SHUTDOWN + extra + 0.5:
            self.world.violated(f"{self.name}: {how} took {took:.1f} s")
        await asyncio.sleep(1.5)
        if process.alive and self.closing:
            self.world.watcher.nothing_left(self)

    def sessions(self) -> list[Session]:
        """What the server has of it, and could know to be over."""
        server = self.world.server
        return [s for s in server.sessions.values() if s.who == self.name and s.reachable]


class KeptStore(StateStore):
    """The file of one machine: it is there when the process comes back."""

    def __init__(self, world: World) -> None:
        super().__init__(Path(":memory:"))
        self._world = world
        #: The consumers that are to come, and what each of them is owed.
        self.names = world.rng.sample(("x", "y", "z"), world.rng.choice((0, 1, 1, 2)))
        self.ledgers: dict[str, Ledger] = {}
        self.full = False

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with super()._transaction():
            yield
            if self.full:
                self._world.saw["a full disk"] += 1
                raise StateError("the disk of the state file is full")

    def reset(self, reason: str, name: str | None = None) -> Reset:
        reset = super().reset(reason, name)
        if not self._world.disturbed:
            self._world.violated(f"a reset for no reason: {reason}")
        for ledger in self.ledgers.values():
            if name in (None, ledger.name):
                ledger.owed = None
        for instance in self._world.instances:
            for seat in instance.seats.values() if instance.store is self else ():
                if name in (None, seat.ledger.name):
                    seat.must_hear, seat.armed = True, False
        return reset

    def close(self) -> None:
        """The process ends, and the file stays."""

    def really_close(self) -> None:
        super().close()


class World:
    """The server, the instances, and the faults that are injected."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.rng: random.Random = sim.rng
        self.violations: list[str] = []
        #: What has happened, so that a test can see that enough did.
        self.saw: Counter[str] = Counter()
        #: Whether anything has happened that is a reason for a reset.
        self.disturbed = False
        #: Whether the instances have one file, as on one machine; or each its own.
        self.shared = self.rng.random() < 0.4
        self.calm = False
        self._kept: set[asyncio.Task[Any]] = set()
        self.watcher = Watcher(self)
        self.server = Server(random.Random(self.rng.random()), self.violated)
        self.server.on_start = self.watcher.started
        self.server.on_flush = self.watcher.flushed
        self.server.is_frozen = lambda session: self.of(session).host.paused
        self.instances: list[Instance] = []

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.sim.now:.3f} s: {what}")
        self.sim.note(f"VIOLATED: {what}")

    def check(self) -> None:
        assert not self.violations, "\n".join(self.violations[:10])

    def of(self, session: Session) -> Instance:
        return next(each for each in self.instances if each.name == session.who)

    def keep(self, task: asyncio.Task[Any]) -> None:
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def live(self) -> None:
        """Trouble first, then calm: it must come to a stream that works, or to a stated end."""
        for number in range(self.rng.choice((1, 2, 2, 3))):
            self.instances.append(Instance(self, f"i{number}"))
        self.keep(asyncio.get_running_loop().create_task(self._write()))
        self.plan_trouble()
        try:
            await self._watch(lambda: False, TROUBLE_UNTIL)
            self.calm_down()
            await self._watch(self._is_settled, SETTLED_AFTER)
            assert self._is_settled(), self._why_not()
            await asyncio.gather(*(instance.close() for instance in self.instances))
            self.check()
        finally:
            for store in {instance.store for instance in self.instances}:
                store.really_close()

    async def _watch(self, done: Callable[[], bool], limit: float) -> None:
        until = self.sim.now + limit
        while self.sim.now < until and not done():
            self.watcher.look()
            self.check()
            await asyncio.sleep(0.5)
            if int(self.sim.now * 2) % 8 == 0:
                self.server.signs_of_life()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self.rng.choice((0.01, 0.3, 2.0)))
            if self.server.up and not self.calm:
                self.server.write()

    # -- trouble -------------------------------------------------------------------------------

    def plan_trouble(self) -> None:
        """Some of everything, at any moment."""
        kinds: list[Callable[[], Any]] = [
            self.cut,
            self.lose,
            self.cut_before,
            self.cut_after,
            self.restart_server,
            self.time_out_statements,
            self.block_slot,
            self.fill_disk,
            self.crash,
            self.freeze,
            self.stop,
            self.nap,
        ]
        rare: list[Callable[[], Any]] = [
            self.lose_slot,
            self.drop_slot,
            self.drop_publication,
            self.new_timeline,
            self.forbid,
            self.unset_wal_level,
            self.drop,
            self.too_many,
        ]
        if self.rng.random() < 0.5:
            kinds += rare
        for _ in range(self.rng.randint(2, 12)):
            self.sim.at(self.rng.uniform(0.0, TROUBLE_UNTIL - 0.5), self._trouble(kinds))

    def _trouble(self, kinds: list[Callable[[], Any]]) -> Callable[[], Any]:
        kind = self.rng.choice(kinds)

        async def happen() -> None:
            self.saw[kind.__name__] += 1
            self.sim.note(f"trouble: {kind.__name__}")
            result = kind()
            if asyncio.iscoroutine(result):
                await result

        return happen

    def _some(self) -> Instance | None:
        running = [instance for instance in self.instances if instance.running]
        return self.rng.choice(running) if running else None

    def _session(self) -> Session | None:
        sessions = list(self.server.sessions.values())
        streaming = [s for s in sessions if s.kind == "replication"]
        chosen = streaming if streaming and self.rng.random() < 0.6 else sessions
        return self.rng.choice(chosen) if chosen else None

    def cut(self) -> None:
        if (session := self._session()) is not None:
            self.server.end_session(session, "server closed the connection unexpectedly")

    def lose(self) -> None:
        if (session := self._session()) is not None:
            self.server.lose(session, self.rng.choice((3.0, 15.0, 40.0)))

    def cut_before(self) -> None:
        self.server.cuts_before += self.rng.randint(1, 3)

    def cut_after(self) -> None:
        self.server.cuts_after += self.rng.randint(1, 3)

    async def restart_server(self) -> None:
        self.server.restart()
        await asyncio.sleep(self.rng.choice((0.2, 2.0, 9.0)))
        self.server.up = True

    async def time_out_statements(self) -> None:
        self.server.statement_timeout = self.rng.choice((0.3, 3.0))
        await asyncio.sleep(self.rng.uniform(1.0, 20.0))
        self.server.statement_timeout = None

    def block_slot(self) -> None:
        self.server.blocked_until = self.sim.now + self.rng.choice((2.0, 12.0, 25.0))

    async def fill_disk(self) -> None:
        """Nothing can be kept for a while."""
        store = self.rng.choice(self.instances).store
        store.full = True
        await asyncio.sleep(self.rng.choice((1.0, 6.0, 25.0)))
        store.full = False

    async def crash(self) -> None:
        """kill -9: its connections are closed, or silently lost."""
        if (instance := self._some()) is None:
            return
        instance.host.kill()
        for session in instance.sessions():
            if self.rng.random() < 0.5:
                self.server.lose(session, self.rng.choice((3.0, 15.0, 40.0)))
            else:
                self.server.end_session(session)
        await self._back(instance)

    async def freeze(self) -> None:
        """SIGSTOP, and later SIGCONT: as long as it takes the server to give it up, or shorter."""
        if (instance := self._some()) is None:
            return
        process = instance.host.process
        instance.host.pause()
        await asyncio.sleep(self.rng.choice((2.0, 12.0, 30.0)))
        process.resume()

    async def stop(self) -> None:
        if (instance := self._some()) is not None:
            await instance.close()
            await self._back(instance)

    async def drop(self) -> None:
        if (instance := self._some()) is not None:
            self.disturbed = True
            await instance.close("drop")
            await self._back(instance)

    async def _back(self, instance: Instance) -> None:
        await asyncio.sleep(self.rng.choice((0.1, 2.0, 10.0)))
        if not self.calm:
            instance.restart()

    async def nap(self) -> None:
        """Asleep there is nothing of it at the server; the next use brings it back."""
        if (instance := self._some()) is None or instance.pg is None:
            return
        pg, process = instance.pg, instance.host.process
        begin = self.sim.now
        instance.napping = True
        try:
            await instance.host.run(pg.sleep())
            if self.sim.now - begin > SHUTDOWN + 0.5:
                self.violated(f"{instance.name}: took {self.sim.now - begin:.1f} s to fall asleep")
            await asyncio.sleep(1.5)
            if process.alive and pg._stack.asleep:
                self.watcher.nothing_left(instance)
                self.saw["it slept"] += 1
            await asyncio.sleep(self.rng.choice((0.1, 5.0)))
            if instance.pg is pg and not instance.fatal:
                await instance.host.run(pg.wake())
        except Exception as error:
            if process.alive and not instance.fatal:
                self.violated(f"{instance.name}: sleep or wake failed: {error!r}")
        finally:
            instance.napping = False

    def lose_slot(self) -> None:
        if self.server.slot is not None:
            self.disturbed = True
            self.server.slot.lost = True
            if self.server.slot.active is not None:
                self.server.slot.active.rouse()

    def drop_slot(self) -> None:
        """Drop the slot as an administrator would: terminate its reader first."""
        if self.server.slot is not None:
            self.disturbed = True
            if self.server.slot.active is not None:
                self.server.end_session(self.server.slot.active)
            self.server.slot = None

    def drop_publication(self) -> None:
        self.disturbed = True
        self.server.publication = False

    async def new_timeline(self) -> None:
        self.disturbed = True
        self.server.timeline += 1
        await self.restart_server()

    async def forbid(self) -> None:
        if (instance := self._some()) is not None:
            why = "password authentication failed for user"
            self.server.refusals[instance.name] = why
            await asyncio.sleep(self.rng.uniform(1.0, 15.0))
            self.server.refusals.pop(instance.name, None)

    async def too_many(self) -> None:
        for instance in self.instances:
            self.server.refusals[instance.name] = "sorry, too many clients already"
        await asyncio.sleep(self.rng.uniform(1.0, 10.0))
        self.server.refusals.clear()

    async def unset_wal_level(self) -> None:
        self.server.wal_level_logical = False
        await asyncio.sleep(self.rng.uniform(1.0, 15.0))
        self.server.wal_level_logical = True

    # -- calm ----------------------------------------------------------------------------------

    def calm_down(self) -> None:
        """Stop all faults, and start everything again except instances that failed for good."""
        server = self.server
        self.calm = True
        server.up = server.wal_level_logical = True
        server.cuts_before = server.cuts_after = 0
        server.blocked_until = 0.0
        server.statement_timeout = None
        server.refusals.clear()
        server.write()
        for instance in self.instances:
            instance.store.full = False
            instance.host.process.resume()
            if instance.fatal and instance.host.alive:
                self.saw["a fatal end"] += 1
                if self.rng.random() < 0.7:
                    continue
            if not instance.running and not instance.napping:
                instance.restart()
            elif instance.pg is not None and instance.pg._stack.asleep:
                instance.host.start(instance.pg.wake())

    def _is_settled(self) -> bool:
        alive = [instance for instance in self.instances if not instance.fatal]
        if not alive:
            return all(self._is_stated(instance) for instance in self.instances)
        active = [i for i in alive if i.pg is not None and i.pg.health.value == "active"]
        if len(active) != 1:
            return False
        slot, server = self.server.slot, self.server
        owner = active[0]
        assert owner.pg is not None
        waiting = all(
            i is owner or (i.pg is not None and i.pg.health.value == "waiting") for i in alive
        )
        return (
            waiting
            and slot is not None
            and slot.active is owner.session
            and slot.confirmed >= server.end
            and owner.pg.machine.at("streaming")
            and owner.pg._stack.core.backoff.attempts == 0
        )

    @staticmethod
    def _is_stated(instance: Instance) -> bool:
        """Check that it has failed, and reports the reason."""
        pg = instance.pg
        assert pg is not None
        told = [event.name for event in pg.last_events]
        return pg.health.value == "failed" and bool(pg.fatal) and "config_error" in told

    def _why_not(self) -> str:
        server, lines = self.server, ["it has not come to rest:"]
        for instance in self.instances:
            attempts = instance.pg._stack.core.backoff.attempts if instance.pg is not None else 0
            state = f"alive={instance.host.alive}, {instance.pg!r}, attempts={attempts}"
            lines.append(f"  {instance.name}: {state}, session={brief(instance.session)}")
            if instance.pg is not None:
                lines += [f"    {event.name}: {event.detail}" for event in instance.pg.last_events][
                    -3:
                ]
        slot = server.slot
        if slot is not None:
            lines.append(f"  slot at {slot.confirmed:#x}, active={brief(slot.active)}")
        lines.append(f"  the log ends at {server.end:#x}, the lock has {brief(server.owner)}")
        return "\n".join(lines)
