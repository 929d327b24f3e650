"""Counters of connections: the same names here, in the metrics and in the docs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["Counters"]


def _count(text: str) -> int:
    """Return the field of a counter; `text` is the help of its metric."""
    return field(default=0, metadata={"help": text})


@dataclass(slots=True)
class Counters:
    """The counters of one address, or of all; each only grows."""

    connects: int = _count("Channels that were connected and used.")
    connect_failures: int = _count("Failed attempts to connect.")
    recoveries: int = _count("Times that a broken connection was replaced.")
    probes_healthy: int = _count("Probes of idle connections at a checkout that were answered.")
    probes_unhealthy: int = _count("Probes that were not answered.")
    renewals: int = _count("Channels that were replaced while their connection worked.")
    moves: int = _count("Moves of a connection to another member of the topology.")
    topology_fetches: int = _count("Successful topology fetches.")
    topology_fetch_failures: int = _count("Failed topology fetches.")
    credential_refreshes: int = _count("Successful refreshes of refused credentials.")
    credential_refresh_failures: int = _count("Failed refreshes of refused credentials.")
    unavailable_answers: int = _count("UNAVAILABLE answers over a live connection, which was kept.")
    stale_errors: int = _count("Ignored errors of replaced connections.")
    calls_waited: int = _count("Calls that waited for a connection.")
    calls_unsent: int = _count("Calls that were not sent: no connection within their timeout.")

    def add(self, other: Counters) -> None:
        """Add the numbers of other counters to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
