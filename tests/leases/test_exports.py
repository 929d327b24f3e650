"""The public names of the package."""

from __future__ import annotations

import pytest

import moored.leases
from moored.leases import sync

pytestmark = pytest.mark.pure


def test_the_public_names() -> None:
    assert moored.leases.__all__ == [
        *("Exclusive", "Lease", "LeaseStatistics", "Leases", "Policy", "RateLimit", "connect"),
        *("Grant", "Held", "Holder", "MemoryStore", "Request", "Store", "Taken"),
        *("FenceRejected", "LeaseError", "LeaseLost", "LeaseRefused"),
        *("StoreMisconfigured", "StoreUnavailable"),
    ]
    for name in moored.leases.__all__:
        assert hasattr(moored.leases, name)


def test_the_public_names_for_threads() -> None:
    assert sync.__all__ == ["SyncLease", "SyncLeases", "SyncRateLimit", "connect"]
