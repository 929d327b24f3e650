"""A watcher that checks the invariants of simulated instances of `Postgres`, independently.

It records violations instead of raising: an exception would only make a supervisor retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from moored.kernel import Condition, Move
from moored.postgres.manage._manager import Manager
from moored.postgres.manage._manager_core import Act, Actions
from moored.postgres.report import CHART
from moored.postgres.server._faults import Diagnosis, FaultVerdict

from .scripted_server import Session, Txn

if TYPE_CHECKING:
    from ._manager_world import Instance, World

__all__ = ["STEPS", "Ledger", "Seat", "Watcher", "brief"]

#: Silence is noticed within 10 s; a part that is told to stop gets a moment.
NOTICED_AFTER = 11.5
#: A connection that was closed here is forgotten at once, but not in the same turn.
AT_ONCE = 0.25
EXACT = 1e-6

STEPS = (
    "start_replication_client",
    "start_replication_client:connecting",
    "start_replication_client:acquiring_lock",
    "start_replication_client:configuring_connection",
    "start_connection_pool",
    "start_connection_pool:connecting",
    "start_shapes_supervisor",
    "start_replication_client:start_streaming",
    "waiting_for_streaming_confirmation",
    "streaming",
)
#: Every move there is, written down once more: forward, again in place, and all over again.
MOVES = {
    *pairwise(STEPS),
    *((step, STEPS[0]) for step in STEPS),
    (STEPS[5], STEPS[4]),
}
#: The steps that are about the replication client, and the one that is about the pools.
ABOUT = {"client": STEPS[1:4], "pool": (STEPS[5],), "subsystem": ()}


class Ledger:
    """What one consumer was promised, and has acknowledged, by its name in one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: It is owed all that ends after this place; None until its stream begins.
        self.owed: int | None = None
        self.acked: set[int] = set()

    def owes(self, txn: Txn) -> bool:
        """Whether the transaction must still come, or come again."""
        return self.owed is not None and txn.end > self.owed and txn.end not in self.acked


class Seat:
    """Where a consumer sits: at one instance, from when it comes until it goes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        #: Whether it must hear of a reset, and whether the next thing that it hears must be one.
        self.must_hear = False
        self.armed = False
        #: The last transaction that it was given.
        self.last: int | None = None

    def heard(self) -> None:
        """Record that a consumer got a reset."""
        self.must_hear = self.armed = False
        self.last = None


class Watcher:
    """What must hold, said once more and independently of the code that is to obey it."""

    def __init__(self, world: World) -> None:
        self.world = world
        #: Who has ever had the lock.
        self.owners: set[str] = set()

    def moved(self, instance: Instance, move: Move) -> None:
        step = (move.source.step, move.target.step)
        instance.was_active |= CHART.at(move.target, "running")
        if CHART.at(move.target, STEPS[2]):
            instance.worked.add("client")
        self.world.saw[f"at {move.target.step}"] += 1
        if step not in MOVES:
            self.world.violated(f"{instance.name}: moved from {step[0]} to {step[1]}")

    def status_changed(self, instance: Instance) -> None:
        pg = instance.pg
        assert pg is not None
        conditions = pg.monitor.conditions()
        expected = status_words(conditions, asleep=pg._stack.asleep)
        status = pg.monitor.status()
        found = (status.conn.value, status.shape.value, status.health.value)
        # While it falls asleep it says what it said before; then, that it sleeps.
        if found != expected and pg._stack.frozen_status is None:
            self.world.violated(f"{instance.name}: it says {found}, the conditions {expected}")
        if not conditions["pg_lock_acquired"].met:
            instance.locked_by = None
        elif instance.locked_by is None:
            instance.locked_by = session = instance.session
            self.owners.add(instance.name)
            if session is None or not session.granted:
                self.world.violated(f"{instance.name}: believes in a lock that it was not given")

    def settled(self, instance: Instance, manager: Manager) -> None:
        """Between two events: the conditions are those of the step that it is at."""
        pg = instance.pg
        if pg is None or pg._restarter.manager is not manager or manager.fatal is not None:
            return
        met = {name: condition.met for name, condition in pg.monitor.conditions().items()}
        at = STEPS.index(pg.machine.step)
        expected = {
            "pg_lock_acquired": at >= 3,
            "replication_client_ready": at >= 4,
            "shape_log_collector_ready": at >= 8,
            "supervisor_processes_ready": at >= 8,
            "integrity_checks_passed": at >= 8,
        }
        for role, pool in manager.pools.items():
            if manager._events.empty():
                expected[f"{role.value}_connection_pool_ready"] = pool.ready  # type: ignore[attr-defined]
        wrong = {name: met[name] for name in expected if met[name] != expected[name]}
        if wrong:
            self.world.violated(f"{instance.name}: at {pg.machine.step}, and {wrong}")

    def reacted(
        self,
        instance: Instance,
        part: str,
        step: str,
        diagnosis: Diagnosis,
        actions: Actions,
        role: str = "",
    ) -> None:
        """A part has failed: tried again in place only if the step was about it."""
        if diagnosis.type == "unknown":
            self.world.violated(f"{instance.name}: {part} failed in a way of its own: {diagnosis}")
        acts = [action.act for action in actions]
        now = instance.pg.machine.step if instance.pg is not None else ""
        in_place = any(a.act is Act.SET_TIMER and a.name == "retry" for a in actions)
        found = (in_place, Act.RESTART in acts, Act.GIVE_UP in acts, Act.DROP_SLOT in acts)
        about = step in ABOUT[part]
        again = instance.was_active or role in instance.worked
        if part == "client" and step == STEPS[1]:
            again |= "client" in instance.worked
        expected = {
            # What has worked once may work again; a pool tries that by itself.
            FaultVerdict.FATAL: (again and about, again and not about, not again, False)
            if part != "pool"
            else (False, False, not again, False),
            FaultVerdict.DROP_SLOT: (False, False, False, True),
            FaultVerdict.RETRY: (about, not about, False, False),
        }[diagnosis.verdict]
        self.world.saw[f"{part} failed: {'in place' if in_place else acts[-1].name}"] += 1
        if found != expected:
            self.world.violated(f"{instance.name}: {part} failed at {step}: {acts}")
        if in_place and now != {"client": STEPS[0], "pool": STEPS[4]}[part]:
            self.world.violated(f"{instance.name}: {part} is tried again at {now}")

    def waits(self, instance: Instance, wait: float) -> None:
        """Each wait is twice the last one, half of it may be added, and none is above 10 s."""
        base = min(2.0**instance.failures, 10.0 / 1.5)
        instance.failures += 1
        if not base <= wait <= min(1.5 * base, 10.0):
            self.world.violated(f"{instance.name}: waits {wait:.2f} s instead of about {base} s")

    def proven(self, instance: Instance) -> None:
        machine = instance.pg.machine if instance.pg is not None else None
        now = self.world.sim.now
        if machine is None or not machine.at("streaming") or now - machine.since < 5.0 - EXACT:
            self.world.violated(f"{instance.name}: the waits begin anew, and nothing is proven")
        instance.failures = 0
        self.world.saw["the stream was proven"] += 1

    def started(self, session: Session, confirmed: int) -> None:
        instance = self.world.of(session)
        self.world.saw["a stream began"] += 1
        for ledger in instance.store.ledgers.values():
            if ledger.owed is None:
                ledger.owed = confirmed
        for seat in instance.seats.values():
            seat.armed = seat.must_hear

    def flushed(self, session: Session, before: int, now: int) -> None:
        """The server may forget: only what everybody has acknowledged, and what was kept first."""
        instance = self.world.of(session)
        if not self.world.shared and self.owners - {instance.name}:
            self.world.disturbed = True  # to the others, the slot was moved
        told = instance.store.confirmed()
        if told is None or told < now:
            self.world.violated(f"{instance.name}: told {now:#x}, and has kept {told}")
        for ledger in instance.store.ledgers.values():
            for txn in self.world.server.log:
                if before <= txn.commit < now and ledger.owes(txn):
                    self.world.violated(
                        f"{instance.name}: {now:#x} is flushed, and {ledger.name} has not "
                        f"acknowledged {txn}"
                    )

    def given(self, instance: Instance, seat: Seat, end: int) -> None:
        """Check the order of transactions: no gaps, and none before a pending reset."""
        log = self.world.server.log
        number = next(txn.number for txn in log if txn.end == end)
        self.world.saw["a transaction came"] += 1
        who = f"{instance.name}: {seat.ledger.name}"
        if seat.armed:
            self.world.violated(f"{who} was not told of the reset")
        if seat.last is not None and number <= seat.last:
            self.world.violated(f"{who} got {number} after {seat.last}")
        begin = 0 if seat.last is None else seat.last + 1
        for txn in log[begin:number]:
            if seat.ledger.owes(txn):
                self.world.violated(f"{who} got {number}, and never {txn.number}")
        seat.last = number

    def look(self) -> None:
        """Check periodically which instances report that they hold the lock."""
        server, now = self.world.server, self.world.sim.now
        for instance in self.world.instances:
            session = instance.locked_by
            away = not instance.host.alive or instance.host.paused
            if away or session is None or server.owner is session:
                instance.wrong_since = None
                continue
            since = instance.wrong_since = instance.wrong_since or now
            if session.closed and now - session.closed_at > AT_ONCE:
                self.world.violated(f"{instance.name}: has let the lock go, and says it has it")
            if now - since > NOTICED_AFTER:
                self.world.violated(f"{instance.name}: lost the lock {now - since:.1f} s ago")

    def nothing_left(self, instance: Instance) -> None:
        """After the end there is nothing at the server, and nothing that runs."""
        if left := instance.sessions():
            self.world.violated(f"{instance.name}: has left {[brief(s) for s in left]}")
        process = instance.host.process
        tasks = [
            task.get_name()
            for task in instance.world.sim.loop.tasks()
            if task.process is process
            and task.get_name().startswith(("postgres/connection/manager", "moored"))
        ]
        if tasks:
            self.world.violated(f"{instance.name}: {tasks} still run")


def status_words(conditions: Mapping[str, Condition], *, asleep: bool) -> tuple[str, str, str]:
    """The tables of the documentation, in code."""
    met = {name for name, condition in conditions.items() if condition.met}
    pools = {"admin_connection_pool_ready", "snapshot_connection_pool_ready"}
    needed = {"replication_client_ready", "integrity_checks_passed", *pools}
    conn = "starting"
    if asleep:
        conn = "sleeping"
    elif "pg_lock_acquired" not in met:
        conn = "waiting_on_lock"
    elif needed <= met:
        conn = "up"
    taking = {"shape_log_collector_ready", "supervisor_processes_ready"} <= met
    shape = "up" if taking else "read_only"
    health = {"sleeping": "sleeping", "waiting_on_lock": "waiting"}.get(conn, "starting")
    if conn == "starting" and met | pools == set(conditions):
        health = "degraded"
    return conn, shape, "active" if (conn, shape) == ("up", "up") else health


def brief(session: Session | None) -> str:
    """A connection in a few words."""
    if session is None:
        return "nobody"
    return f"{session.who}/{session.pid} alive={session.alive} reachable={session.reachable}"
