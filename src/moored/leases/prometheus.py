"""Prometheus metrics of lease clients, read at each scrape.

::

    prometheus_client.REGISTRY.register(LeasesCollector(leases))

Needs prometheus-client, which `moored[service]` installs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moored.kernel.prometheus import Metric, SourceCollector, counter, gauge

from ._client import Leases

__all__ = ["LeasesCollector"]

PREFIX = "moored_leases_"
LABELS = ("leases",)
_GAUGES = {
    "held": "Leases held, local ones included.",
    "local": "Leases granted by this process while the store was unavailable.",
    "in_doubt": "Leases that the store may hold and no caller does; they are being released.",
    "available": "1 while the store answers.",
}
_COUNTERS = {
    "acquired": "Leases granted by the store.",
    "refused": "Acquires refused because the limit was reached.",
    "released": "Leases released by their holders.",
    "renewed": "Renewals, each counted per lease.",
    "local_granted": "Leases granted or kept by this process in an outage of the store.",
    "local_refused": "Acquires refused in an outage because the local limit was reached.",
}
_LOSSES = ("expired", "gone", "refused", "closed")


class LeasesCollector(SourceCollector[Leases]):
    """Prometheus metrics of lease clients, by name; refers to them weakly."""

    def families(self, sources: Sequence[Leases]) -> Iterator[Metric]:
        """Yield everything that `statistics()` reports."""
        numbers = [(client.name, client.statistics()) for client in sources]
        for kind, table in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, text in table.items():
                samples = [((client,), float(getattr(now, name))) for client, now in numbers]
                yield kind(PREFIX + name, text, LABELS, samples)
        yield counter(
            f"{PREFIX}lost",
            "Leases lost by their holders, by reason.",
            (*LABELS, "reason"),
            [
                ((client, reason), getattr(now, f"lost_{reason}"))
                for client, now in numbers
                for reason in _LOSSES
            ],
        )
