"""The statistics of a pool under the names of psycopg_pool."""

from __future__ import annotations

from typing import Any

from ._reservoir import Reservoir

__all__ = ["counters", "measures"]


def measures(reservoir: Reservoir[Any]) -> dict[str, int]:
    """Return the current numbers."""
    core = reservoir.core
    return {
        "pool_min": core.target,
        "pool_max": core.max_size,
        "pool_size": len(core.items) + core.opening,
        "pool_available": len(core.ready),
        "requests_waiting": len(core.waiting),
    }


def counters(reservoir: Reservoir[Any], *, failed_checks: int, returns_bad: int) -> dict[str, int]:
    """Return the counters.

    :param failed_checks: checkouts whose connection failed its check and was replaced.
    :param returns_bad: connections that were returned in an unusable state.
    """
    core, upkeep = reservoir.core, reservoir.upkeep
    failed = core.timeouts + core.refused
    return {
        "requests_num": core.checkouts - failed_checks + failed,
        "requests_queued": core.queued,
        "requests_wait_ms": int(1000 * core.waited),
        "requests_errors": failed,
        "usage_ms": int(1000 * core.usage),
        "returns_bad": returns_bad,
        "connections_num": core.births + sum(upkeep.attempts.failures.values()),
        "connections_ms": int(1000 * upkeep.attempts.seconds),
        "connections_errors": sum(upkeep.attempts.failures.values()),
        "connections_lost": upkeep.lost,
    }
