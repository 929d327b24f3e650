"""Simulated faults: hosts crash and pause, responses are late or lost, clocks step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.leases.cluster import TROUBLE_UNTIL, Cluster
from tests.mutants import planted_defects

from moored.leases import MemoryStore, Request
from moored.leases._keeper import Keeper
from moored.leases._lease_table import LeaseTable
from moored.testing import Mutant, Sim, Unretrieved, assert_caught, mutant, scaled, simulate

pytestmark = pytest.mark.usefixtures("quiet")


async def faulty_cluster(sim: Sim) -> tuple[int, int, int]:
    """Run a cluster with random faults; all leases must be free one ttl after its end."""
    cluster = Cluster(sim)
    cluster.plan_trouble()
    await cluster.model.watch(TROUBLE_UNTIL + 5.0, every=0.2)
    await cluster.settle()
    model = cluster.model
    return model.grants, model.peak, model.told


def test_invariants_hold_in_two_thousand_simulated_schedules() -> None:
    report = simulate(faulty_cluster, scaled(2000, least=10))
    assert report.distinct == report.schedules


# -- defects that must be noticed --------------------------------------------------------------


def _counts_the_dead(self: MemoryStore) -> None:
    """A counter goes up with each lease and down with each release, and a crash is neither."""


def _renews_for_anybody(self: MemoryStore, request: Request) -> bool:
    """Whoever asks extends whatever lease there is."""
    leases = self._leases_of(request.key)
    return any(_renew(self, replace(request, id=known)) for known in leases)


def _revives(self: MemoryStore, request: Request) -> bool:
    """A renewal brings back what has ended, and was given to others."""
    if not _renew(self, request):
        lease = self._new(request)
        self._keys.setdefault(request.key, {})[request.id] = lease
        self._ends.set((request.key, request.id), lease.expires)
    return True


def _releases_anybodys(self: MemoryStore, request: Request) -> bool:
    """What is released is some lease of the key, not the one with this id."""
    leases = list(self._leases_of(request.key))
    return any(_release(self, replace(request, id=known)) for known in leases)


def _forgets_fences(self: MemoryStore, request: Request) -> Any:
    """The fence begins again when a key has no lease."""
    lease = _new(self, request)
    lease.fence = 1 + len(self._leases_of(request.key))
    return lease


def _believes_the_arrival(self: LeaseTable, request: Request, sent_at: float) -> float:
    """The deadline counts from when the answer came."""
    return _deadline(self, request, asyncio.get_running_loop().time())


def _waits_for_the_store(self: Keeper) -> None:
    """Holders are notified only when the renewal returns: there is no timer at the deadline."""


_new, _renew, _release = MemoryStore._new, MemoryStore._renew, MemoryStore._release
_deadline = LeaseTable._deadline

MUTANTS = [
    mutant(MemoryStore, "_tidy", _counts_the_dead, name="a counter kept on crash"),
    mutant(MemoryStore, "_renew", _renews_for_anybody, name="a renewal without owner check"),
    mutant(MemoryStore, "_renew", _revives, name="a renewal that revives"),
    mutant(MemoryStore, "_release", _releases_anybodys, name="a release without owner check"),
    mutant(MemoryStore, "_new", _forgets_fences, name="a fence that begins again"),
    mutant(MemoryStore, "_now", lambda self: self._clock.wall(), name="a store on the wall clock"),
    mutant(
        LeaseTable, "_deadline", _believes_the_arrival, name="a deadline from the answer's arrival"
    ),
    mutant(Keeper, "_arm", _waits_for_the_store, name="no notification while a renewal hangs"),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(
        MUTANTS,
        "a deadline from the answer's arrival",
        "a renewal that revives",
        "a store on the wall clock",
        "no notification while a renewal hangs",
        "a counter kept on crash",
    ),
)
def test_planted_defects_are_detected(planted: Mutant) -> None:
    caught = assert_caught(faulty_cluster, planted, within=400, clean=0)
    # The model of the store fails in a callback, whose exception is not awaited.
    assert isinstance(caught.error, AssertionError | Unretrieved), caught
