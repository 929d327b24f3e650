"""Simulated outages with local leases: each process keeps its limit, and the cluster afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.leases.cluster import REFUSE, TROUBLE_UNTIL, Cluster
from tests.mutants import planted_defects

from moored.leases._keeper import Keeper
from moored.leases._lease_table import Entry, LeaseTable
from moored.testing import Mutant, Sim, Unretrieved, assert_caught, mutant, scaled, simulate

pytestmark = pytest.mark.usefixtures("quiet")

LOCAL = replace(REFUSE, on_unavailable="local")
#: The longest wait of the backoff, two calls that time out, and what a paused host had to do.
RECOVERY = 8.0


async def cluster_that_goes_on(sim: Sim) -> int:
    """Real leases never exceed the limit; local ones end or become real when the store is back."""
    cluster = Cluster(sim, LOCAL)
    cluster.plan_trouble()
    most_local = 0
    while sim.now < TROUBLE_UNTIL:
        cluster.model.check()
        most_local = max(most_local, cluster.model.local())
        await asyncio.sleep(0.2)
    cluster.calm()
    await asyncio.sleep(RECOVERY)
    cluster.model.check()
    assert cluster.model.local() == 0, "local leases after the outage"
    await cluster.settle()
    return most_local


def test_local_leases_are_exchanged() -> None:
    simulate(cluster_that_goes_on, scaled(1000, least=5))


def _exchanges_all(self: LeaseTable, known: str) -> Entry | None:
    """A local lease that the store refuses is kept."""
    entry = self._entries.get(known)
    if entry is not None and entry.local:
        entry.local, entry.deadline = False, float("inf")
        return None
    return _released(self, known)


async def _never_exchanges(self: Keeper) -> None:
    """Once local, always local."""
    await asyncio.sleep(1.0)


def _reuses_the_id(self: LeaseTable, entry: Entry, known: str) -> None:
    """A local lease is asked for again under the id of an answer that was lost."""


_released = LeaseTable.released

MUTANTS = [
    mutant(LeaseTable, "released", _exchanges_all, name="a refused local lease kept"),
    mutant(Keeper, "_exchange", _never_exchanges, name="local leases never exchanged"),
    mutant(LeaseTable, "renamed", _reuses_the_id, name="an id in doubt used again"),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(MUTANTS, "an id in doubt used again", "local leases never exchanged"),
)
def test_planted_defects_are_detected(planted: Mutant) -> None:
    caught = assert_caught(cluster_that_goes_on, planted, within=400, clean=0)
    assert isinstance(caught.error, AssertionError | Unretrieved), caught
