"""The report of a stream: its state as plain data.

`pg.statistics()` returns it, `/v1/status` sends it, the metrics are taken from it, and
`explain()` turns it into text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moored.kernel import duration

from .._lsn import Lsn
from ..server import diagnose
from ._health import Health
from ._phases import CLIENT, WORDS

if TYPE_CHECKING:
    from ..manage import ManagedPool, Manager, Stack

__all__ = ["report", "stream_fact"]

#: The number of events in a report.
EVENTS = 20
#: Seconds that the oldest transaction may wait for its acknowledgement without a lag that is shown.
MOMENT = 1.0
CONFIGURING = f"{CLIENT}:configuring_connection"


def report(
    of: Stack, manager: Manager, *, health: Health, fatal: str | None, restarts: int
) -> dict[str, Any]:
    """Return the report, in types that JSON can represent.

    :param manager: the current or the last run of the connection subsystem.
    :param restarts: restarts of the connection subsystem.
    """
    machine, status = of.machine, of.monitor.status()
    now = of.clock.monotonic()
    events = [event._asdict() for event in of.events.last]
    counts = of.events.counts
    return {
        "stream_id": of.settings.stream_id,
        "health": health.value,
        "fatal": fatal,
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
        "server": _server(manager),
        "silence": manager.silence,
        **_stream(of, manager, now),
        "slot": _slot(of, manager, now),
        "lock": _lock(of, manager),
        # The transactions that the creation of the slot waits for.
        "slot_blockers": [each._asdict() for each in manager.blockers if machine.at(CONFIGURING)],
        "pools": {
            role.value: _pool(each) for role, each in manager.pools.items() if not each.pool.closed
        },
        "consumers": of.hub.consumers(),
        "connects": counts.get("waiting_for_connection_lock", 0),
        "restarts": restarts,
        "event_counts": dict(counts),
        "resets": [event for event in events if event["name"] == "warning"][-EVENTS:],
        "events": events[-EVENTS:],
    }


def _server(manager: Manager) -> dict[str, Any] | None:
    client = manager.client
    if client is None or not client.setup.findings.version:
        return None
    found = client.setup.findings
    return {
        "version": f"{found.version // 10000}.{found.version % 10000}",
        "system_id": found.system_id,
        "timeline_id": found.timeline_id,
        "backend_pid": found.backend_pid,
    }


def stream_fact(of: Stack, manager: Manager) -> str:
    """Return in a few words how far the stream is behind; empty while it does not run."""
    if (lag := _stream(of, manager, of.clock.monotonic())["lag"]) is None:
        return ""
    seconds: float = lag["seconds"]
    return f"{duration(seconds)} behind" if seconds >= MOMENT else "caught up"


def _stream(of: Stack, manager: Manager, now: float) -> dict[str, Any]:
    """Return the positions and the lag of the stream, and how much was received."""
    client, kept = manager.client, manager.retained
    found: dict[str, Any] = dict.fromkeys(("received", "flushed", "last_seen", "lag"))
    found["silent"] = None if client is None else client.silent_for
    if client is not None and client.positions is not None:
        # `Positions` holds last bytes; an LSN is the position after one.
        received, flushed = client.positions.received + 1, client.positions.flushed + 1
        seen = client.positions.last_seen
        found |= {
            "received": str(Lsn(received)),
            "flushed": str(Lsn(flushed)),
            "last_seen": str(Lsn(seen)),
        }
        # While nothing arrives, there may be more to read: how much is unknown.
        if of.machine.at("running") and not client.silent_for:
            end = max(received, 0 if kept is None else kept.current)
            seconds = client.lag.seconds(flushed, seen, now)
            found["lag"] = {"bytes": max(end - flushed, 0), "seconds": seconds}
    return {**found, "transactions": of.totals.transactions, "bytes": of.totals.bytes}


def _slot(of: Stack, manager: Manager, now: float) -> dict[str, Any]:
    """Return the slot, and the WAL that the server retained for it at the last query."""
    names = {"name": of.settings.slot_name, "publication": of.settings.publication_name}
    kept = manager.retained
    if kept is None:
        return {**names, "retained": None, "active_pid": None, "wal_status": None, "looked": None}
    return {
        **names,
        "retained": kept.bytes,
        "active_pid": kept.active_pid,
        "wal_status": kept.wal_status,
        "looked": now - manager.retained_at,
    }


def _lock(of: Stack, manager: Manager) -> dict[str, Any]:
    """Return whether this instance holds the lock; during the wait, the known holder."""
    held = of.monitor.conditions()["pg_lock_acquired"].met
    holder = manager.standby_of
    return {"held": held, "holder": None if holder is None else holder._asdict()}


def _pool(managed: ManagedPool) -> dict[str, Any]:
    upkeep = managed.pool.reservoir.upkeep
    failing = upkeep.attempts.error
    return {
        "state": managed.status.value,
        "connected": len(managed.pool.reservoir.core.items),
        "error": None if failing is None else diagnose(failing).message,
        **{
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in managed.pool.statistics()._asdict().items()
        },
    }
