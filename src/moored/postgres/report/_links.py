"""What a manager knows about its connections to each server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moored.kernel import Link
from moored.reservoir._conninfo import resolve
from moored.reservoir._conninfo import server_of as address_of

from ._health import ConnectionState

if TYPE_CHECKING:
    from ..listen import Listener
    from ..manage import Manager, Stack

__all__ = ["links", "server_of"]

KIND = "PostgreSQL"
#: What the pools are for, by their roles.
POOLS = {"admin": "pool of administration", "snapshot": "pool of callers"}


def server_of(url: str) -> str:
    """Return the address of the server of a connection string: "db:5432", "one:5432,two:5433"."""
    return address_of(resolve(url, {}))


def links(
    of: Stack, manager: Manager, listener: Listener | None, notify_url: str | None
) -> list[Link]:
    """Return the change stream, the pools and the listener; none while they sleep."""
    if of.asleep:
        return []
    server = server_of(of.settings.replication_url)
    callers = server_of(of.settings.database_url)
    # A standby has no stream, and opens that of administration when it takes over.
    standby = of.monitor.status().conn is ConnectionState.WAITING_ON_LOCK
    found = [] if standby and manager.standby_of else [_stream(of, manager, server)]
    for role, each in manager.pools.items():
        where = callers if role.value == "snapshot" else server
        found.append(each.pool.reservoir.link(where, of=POOLS[role.value], vital=False))
    if listener is not None and listener.is_open:
        where = server_of(notify_url or of.settings.database_url)
        found.append(listener.link(where)._replace(kind=KIND))
    return found


def _stream(of: Stack, manager: Manager, server: str) -> Link:
    heard_at, outage = of.totals.heard_at, of.outages.now
    if of.machine.at("running"):
        silent = manager.client is not None and bool(manager.client.silent_for)
        why = "no byte arrives on the open connection" if silent else ""
        return Link(server, not silent, heard_at, why, silent, False, KIND, "change stream")
    if outage is None:
        return Link(server, None, heard_at, kind=KIND, of="change stream")
    # It was heard since: the server accepts connections, and refuses the stream.
    refused = heard_at is not None and heard_at > of.outages.since
    return Link(server, False, heard_at, outage.last, False, refused, KIND, "change stream")
