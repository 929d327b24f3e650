"""Counters of connections: the same names here, in the metrics and in the docs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, fields

__all__ = ["Counters", "Ledger"]

#: The number of addresses with counters of their own. Beyond it, the counters of addresses without
#: a connection are added up under `OTHERS`.
MAX_ADDRESSES = 1000
OTHERS = "others"


@dataclass(slots=True)
class Counters:
    """The counters of one address, or of all; each only grows."""

    #: Channels that were connected and used.
    connects: int = 0
    #: Failed attempts to connect.
    connect_failures: int = 0
    #: Times that a broken connection was replaced.
    recoveries: int = 0
    #: Probes of idle connections, before their checkout, that were answered.
    probes_healthy: int = 0
    #: Probes that were not answered.
    probes_unhealthy: int = 0
    #: Channels that were replaced because of their age.
    renewals: int = 0
    #: Moves of a connection to another member of the topology.
    moves: int = 0
    #: Successful topology fetches.
    topology_fetches: int = 0
    #: Failed topology fetches.
    topology_fetch_failures: int = 0
    #: Successful refreshes of refused credentials.
    credential_refreshes: int = 0
    #: Failed refreshes of refused credentials.
    credential_refresh_failures: int = 0
    #: UNAVAILABLE answers over a live connection, which was kept.
    unavailable_answers: int = 0
    #: Ignored errors of replaced connections.
    stale_errors: int = 0
    #: Calls that waited for a connection.
    calls_waited: int = 0
    #: Calls that were not sent: no connection within their timeout.
    calls_unsent: int = 0

    def add(self, other: Counters) -> None:
        """Add the numbers of other counters to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


class Ledger:
    """The counters of a manager, by address; the caller holds the manager's lock."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, Counters] = OrderedDict()

    def of(self, address: str, connected: Callable[[], Container[str]]) -> Counters:
        """Return the counters of an address; `connected` returns the addresses to keep."""
        if (found := self._by_address.get(address)) is None:
            if len(self._by_address) >= MAX_ADDRESSES:
                self._forget(connected())
            found = self._by_address[address] = Counters()
        return found

    def _forget(self, connected: Container[str]) -> None:
        for address in self._by_address:
            if address != OTHERS and address not in connected:
                gone = self._by_address.pop(address)
                self._by_address.setdefault(OTHERS, Counters()).add(gone)
                return

    def total(self) -> Counters:
        """Return the sum over all addresses."""
        total = Counters()
        for _, each in self:
            total.add(each)
        return total

    def __iter__(self) -> Iterator[tuple[str, Counters]]:
        # Copying is one step of the interpreter: another thread may add an address meanwhile.
        return iter(list(self._by_address.items()))
