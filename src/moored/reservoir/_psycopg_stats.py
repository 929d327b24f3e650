"""A pool in numbers, under the names of psycopg_pool."""

from __future__ import annotations

from typing import Any

from ._reservoir import Reservoir

__all__ = ["counters", "measures"]


def measures(reservoir: Reservoir[Any]) -> dict[str, int]:
    """What there is now."""
    core = reservoir.core
    return {
        "pool_min": core.target,
        "pool_max": core.max_size,
        "pool_size": len(core.items) + core.opening,
        "pool_available": len(core.ready),
        "requests_waiting": len(core.waiting),
    }


def counters(reservoir: Reservoir[Any], *, unfit: int, returns_bad: int) -> dict[str, int]:
    """What happened so far; `unfit` checkouts came to nothing because of a failed check."""
    core, works = reservoir.core, reservoir.upkeep
    failed = core.timeouts + core.refused
    return {
        "requests_num": core.checkouts - unfit + failed,
        "requests_queued": core.queued,
        "requests_wait_ms": int(1000 * core.waited),
        "requests_errors": failed,
        "usage_ms": int(1000 * core.usage),
        "returns_bad": returns_bad,
        "connections_num": core.births + sum(works.failures.values()),
        "connections_ms": int(1000 * works.connect_time),
        "connections_errors": sum(works.failures.values()),
        "connections_lost": works.lost,
    }
