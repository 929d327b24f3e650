"""What the conditions amount to: is it up, and if not, what is it waiting for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from moored.kernel import Condition

__all__ = ["CONDITIONS", "Connection", "Health", "Persistent", "Status", "status_of"]

#: What must hold before everything works, in the order in which it comes to hold.
CONDITIONS = (
    "pg_lock_acquired",
    "replication_client_ready",
    "admin_connection_pool_ready",
    "snapshot_connection_pool_ready",
    "shape_log_collector_ready",
    "supervisor_processes_ready",
    "integrity_checks_passed",
)
_CONNECTION = (
    "replication_client_ready",
    "admin_connection_pool_ready",
    "snapshot_connection_pool_ready",
    "integrity_checks_passed",
)
_PERSISTENT = ("shape_log_collector_ready", "supervisor_processes_ready")
_POOLS = ("admin_connection_pool_ready", "snapshot_connection_pool_ready")


class Connection(Enum):
    """How the connections are."""

    WAITING_ON_LOCK = "waiting_on_lock"
    STARTING = "starting"
    UP = "up"
    SLEEPING = "sleeping"


class Persistent(Enum):
    """How that is which outlives the connections."""

    STARTING = "starting"
    #: It can be read, and takes nothing new while another instance streams.
    READ_ONLY = "read_only"
    UP = "up"


class Health(Enum):
    """How it is altogether, from the best to the worst, with the answer that an HTTP check gets."""

    ACTIVE = "active"
    SLEEPING = "sleeping"
    DEGRADED = "degraded"
    WAITING = "waiting"
    STARTING = "starting"
    FAILED = "failed"

    @property
    def http(self) -> int:
        """The code of an HTTP health check."""
        return _HTTP[self]


_HTTP = {
    Health.ACTIVE: 200,
    Health.SLEEPING: 200,
    Health.DEGRADED: 200,
    Health.WAITING: 202,
    Health.STARTING: 202,
    Health.FAILED: 503,
}


class Status(NamedTuple):
    """How the connections and the persistent part are."""

    conn: Connection
    shape: Persistent
    #: Whether the stream, which is the main job, works while a pool is not what it should be.
    degraded: bool = False

    @property
    def health(self) -> Health:
        """All of it in one word."""
        if self.conn is Connection.SLEEPING:
            return Health.SLEEPING
        if self.degraded:
            return Health.DEGRADED
        if self.conn is Connection.UP and self.shape is Persistent.UP:
            return Health.ACTIVE
        if self.conn is Connection.WAITING_ON_LOCK and self.shape is not Persistent.STARTING:
            return Health.WAITING
        return Health.STARTING


def status_of(conditions: Mapping[str, Condition], *, asleep: bool, loaded: bool) -> Status:
    """What the conditions amount to.

    :param asleep: whether the connections were closed because nobody needs them.
    :param loaded: whether what is kept here was read, so that a standby can serve it.
    """
    return Status(
        Connection.SLEEPING if asleep else _connection(conditions),
        _persistent(conditions, loaded),
        not asleep and _degraded(conditions),
    )


def _connection(conditions: Mapping[str, Condition]) -> Connection:
    if not conditions["pg_lock_acquired"].met:
        return Connection.WAITING_ON_LOCK
    if all(conditions[name].met for name in _CONNECTION):
        return Connection.UP
    return Connection.STARTING


def _degraded(conditions: Mapping[str, Condition]) -> bool:
    """Whether nothing but a pool is missing: they were full before the checks were passed."""
    missing = {name for name in CONDITIONS if not conditions[name].met}
    return bool(missing) and missing <= set(_POOLS)


def _persistent(conditions: Mapping[str, Condition], loaded: bool) -> Persistent:
    if all(conditions[name].met for name in _PERSISTENT):
        return Persistent.UP
    return Persistent.READ_ONLY if loaded else Persistent.STARTING
