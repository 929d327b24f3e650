"""The status and the health, derived from the conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from moored.kernel import Condition, Tree

#: The conditions of a working stream, in the order in which they are met.
CONDITIONS = (
    "pg_lock_acquired",
    "replication_client_ready",
    "admin_connection_pool_ready",
    "snapshot_connection_pool_ready",
    "shape_log_collector_ready",
    "supervisor_processes_ready",
    "integrity_checks_passed",
)
_POOLS = ("admin_connection_pool_ready", "snapshot_connection_pool_ready")
_CONNECTION = ("replication_client_ready", *_POOLS, "integrity_checks_passed")
_PERSISTENT = ("shape_log_collector_ready", "supervisor_processes_ready")
#: The nodes of the supervision tree that own the connections, or lead to their owner.
_OWNERS = ("connection", "manager", "connections", "replication")


class ConnectionState(Enum):
    """The state of the connections."""

    WAITING_ON_LOCK = "waiting_on_lock"
    STARTING = "starting"
    UP = "up"
    SLEEPING = "sleeping"

    @property
    def has_lock(self) -> bool:
        """Whether this instance has the lock of the stream, which it gives up while it sleeps."""
        return self in (ConnectionState.STARTING, ConnectionState.UP)


class Persistent(Enum):
    """The state of the consumers and their positions, which outlive the connections."""

    STARTING = "starting"
    #: The stored state was read; no new transactions are accepted yet.
    READ_ONLY = "read_only"
    UP = "up"


class Health(Enum):
    """The overall health, from the best to the worst, with its HTTP status code."""

    ACTIVE = "active"
    SLEEPING = "sleeping"
    DEGRADED = "degraded"
    WAITING = "waiting"
    STARTING = "starting"
    FAILED = "failed"

    @property
    def http(self) -> int:
        """The status code for an HTTP health check."""
        if self is Health.FAILED:
            return 503
        return 202 if self in (Health.WAITING, Health.STARTING) else 200


class Status(NamedTuple):
    """The state of the connections, and of the consumers and their positions."""

    conn: ConnectionState
    shape: Persistent
    #: Whether the stream works while a pool lacks connections.
    degraded: bool = False

    def __str__(self) -> str:
        conn, shape = self.conn.value.replace("_", " "), self.shape.value.replace("_", " ")
        return f"{self.health.value} (connections: {conn}, changes: {shape})"

    @property
    def health(self) -> Health:
        """The overall health."""
        if self.conn is ConnectionState.SLEEPING:
            return Health.SLEEPING
        if self.degraded:
            return Health.DEGRADED
        if self.conn is ConnectionState.UP and self.shape is Persistent.UP:
            return Health.ACTIVE
        if self.conn is ConnectionState.WAITING_ON_LOCK and self.shape is not Persistent.STARTING:
            return Health.WAITING
        return Health.STARTING


def status_of(conditions: Mapping[str, Condition], *, asleep: bool, loaded: bool) -> Status:
    """Derive the status from the conditions.

    :param asleep: whether the connections were closed after a time without use.
    :param loaded: whether the stored state was read.
    """
    return Status(
        ConnectionState.SLEEPING if asleep else _connection(conditions),
        _persistent(conditions, loaded),
        not asleep and _degraded(conditions),
    )


def _connection(conditions: Mapping[str, Condition]) -> ConnectionState:
    if not conditions["pg_lock_acquired"].met:
        return ConnectionState.WAITING_ON_LOCK
    if all(conditions[name].met for name in _CONNECTION):
        return ConnectionState.UP
    return ConnectionState.STARTING


def _degraded(conditions: Mapping[str, Condition]) -> bool:
    """Return whether only conditions of pools are unmet."""
    missing = {name for name in CONDITIONS if not conditions[name].met}
    return bool(missing) and missing <= set(_POOLS)


def _persistent(conditions: Mapping[str, Condition], loaded: bool) -> Persistent:
    if all(conditions[name].met for name in _PERSISTENT):
        return Persistent.UP
    return Persistent.READ_ONLY if loaded else Persistent.STARTING


def with_health(tree: Tree, health: Health) -> Tree:
    """Show the health on the nodes that own connections: they run also without a server."""
    children = tuple(
        with_health(child, health) if child.name in _OWNERS else child for child in tree.children
    )
    unhealthy = tree.state == "running" and health is not Health.ACTIVE
    return replace(tree, state=health.value if unhealthy else tree.state, children=children)
