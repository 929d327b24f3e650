"""The report of a stream: its state as plain data.

`pg.statistics()` returns it, `/v1/status` sends it, the metrics are taken from it, and
`explain()` turns it into text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moored.kernel import Clock, Machine, StatusMonitor

from .._lsn import Lsn
from .._settings import Settings
from ..server import diagnose
from ._health import Health, Status
from ._outages import Outages
from ._phases import CLIENT, WORDS

if TYPE_CHECKING:
    from .._postgres import StackEvent
    from ..manage import ManagedPool, Manager
    from ..stream import ReceivedTotals

__all__ = ["Sources", "report"]

#: The number of events in a report.
EVENTS = 20
LOCKING = f"{CLIENT}:acquiring_lock"
CONFIGURING = f"{CLIENT}:configuring_connection"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The objects and values that a report is made from."""

    settings: Settings
    clock: Clock
    machine: Machine
    monitor: StatusMonitor[Status]
    outages: Outages
    health: Health
    fatal: str | None
    #: The current or the last run of the connection subsystem; None before the first.
    manager: Manager | None
    consumers: Mapping[str, Mapping[str, object]]
    events: Iterable[StackEvent]
    #: How often each event has occurred.
    counts: Mapping[str, int]
    totals: ReceivedTotals
    #: Restarts of the connection subsystem.
    restarts: int


def report(of: Sources) -> dict[str, Any]:
    """Return the report, in types that JSON can represent."""
    machine, status = of.machine, of.monitor.status()
    now = of.clock.monotonic()
    events = [event._asdict() for event in of.events]
    return {
        "stream_id": of.settings.stream_id,
        "health": of.health.value,
        "fatal": of.fatal,
        "conn": status.conn.value,
        "shape": status.shape.value,
        "phase": machine.phase,
        "step": machine.step,
        "doing": WORDS[machine.step],
        "for": now - machine.since,
        "since": of.clock.wall() - (now - machine.since),
        "cause": machine.history[-1].cause if machine.history else None,
        **of.outages.report(),
        "conditions": of.monitor.as_dict()["conditions"],
        "server": _server(of),
        **_stream(of, now),
        "slot": _slot(of, now),
        "lock": _lock(of),
        "slot_blockers": _blockers(of),
        "pools": {role.value: _pool(pool) for role, pool in _pools(of).items()},
        "consumers": {name: dict(each) for name, each in of.consumers.items()},
        "connects": of.counts.get("waiting_for_connection_lock", 0),
        "restarts": of.restarts,
        "event_counts": dict(of.counts),
        "resets": [event for event in events if event["name"] == "warning"][-EVENTS:],
        "events": events[-EVENTS:],
    }


def _server(of: Sources) -> dict[str, Any] | None:
    client = of.manager.client if of.manager is not None else None
    if client is None or not client.setup.findings.version:
        return None
    found = client.setup.findings
    return {
        "version": f"{found.version // 10000}.{found.version % 10000}",
        "system_id": found.system_id,
        "timeline_id": found.timeline_id,
        "backend_pid": found.backend_pid,
    }


def _stream(of: Sources, now: float) -> dict[str, Any]:
    """Return the positions and the lag of the stream, and how much was received."""
    manager = of.manager
    client = manager.client if manager is not None else None
    found: dict[str, Any] = dict.fromkeys(("received", "flushed", "last_seen", "lag"))
    if manager is not None and client is not None and client.positions is not None:
        # `Positions` holds last bytes; an LSN is the position after one.
        received, flushed = client.positions.received + 1, client.positions.flushed + 1
        seen = client.positions.last_seen
        found |= {
            "received": str(Lsn(received)),
            "flushed": str(Lsn(flushed)),
            "last_seen": str(Lsn(seen)),
        }
        if of.machine.phase == "running":
            end = max(received, 0 if manager.retained is None else manager.retained.current)
            seconds = client.lag.seconds(flushed, seen, now)
            found["lag"] = {"bytes": max(end - flushed, 0), "seconds": seconds}
    return {**found, "transactions": of.totals.transactions, "bytes": of.totals.bytes}


def _slot(of: Sources, now: float) -> dict[str, Any]:
    """Return the slot, and the WAL that the server retained for it at the last query."""
    names = {"name": of.settings.slot_name, "publication": of.settings.publication_name}
    kept = of.manager.retained if of.manager is not None else None
    if of.manager is None or kept is None:
        return {**names, "retained": None, "active_pid": None, "wal_status": None, "looked": None}
    return {
        **names,
        "retained": kept.bytes,
        "active_pid": kept.active_pid,
        "wal_status": kept.wal_status,
        "looked": now - of.manager.retained_at,
    }


def _lock(of: Sources) -> dict[str, Any]:
    """Return whether this instance holds the lock; during the wait, the known holder."""
    held = of.monitor.conditions()["pg_lock_acquired"].met
    waiting = of.machine.step == LOCKING
    holder = of.manager.holder if of.manager is not None and waiting else None
    return {"held": held, "holder": None if holder is None else holder._asdict()}


def _blockers(of: Sources) -> list[dict[str, Any]]:
    """Return the transactions that the creation of the slot waits for."""
    if of.manager is None or of.machine.step != CONFIGURING:
        return []
    return [blocker._asdict() for blocker in of.manager.blockers]


def _pools(of: Sources) -> dict[Any, ManagedPool]:
    pools = of.manager.pools if of.manager is not None else {}
    return {role: each for role, each in pools.items() if not each.pool.closed}


def _pool(managed: ManagedPool) -> dict[str, Any]:
    upkeep = managed.pool.reservoir.upkeep
    failing = upkeep.last_error if upkeep.failing_for is not None else None
    return {
        "state": managed.status.value,
        "connected": len(managed.pool.reservoir.core.items),
        "error": None if failing is None else diagnose(failing).message,
        **{
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in managed.pool.statistics()._asdict().items()
        },
    }
