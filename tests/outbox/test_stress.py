"""Publishers of every kind while backends are terminated: no event is missed or doubled."""

from __future__ import annotations

from typing import Any

from tests.postgres.server import own_server

from moored.testing import base_seed, scaled

from .stress import stress_run

FULL = scaled(100) >= 100


async def test_no_event_is_missed_doubled_or_out_of_order(record_property: Any) -> None:
    """The readers that continue after the highest id, or order by (xid, id), do miss some."""
    async with own_server(max_prepared_transactions="64") as server:
        crash_every = 6.0 if FULL else 0.0
        found = await stress_run(
            server.url, scaled(4000, least=150), base_seed(), crash_every=crash_every
        )
    for name in ("id", "xid"):
        record_property(f"missed_by_{name}", found.missed(name))
        assert found.missed(name) > 0
    for name in ("steady", "other", "restarted"):
        assert found.read[name] == found.stored, "each once, and in order"
    assert found.terminated > 0
    assert len(set(found.stored)) == len(found.stored)
    assert found.crashes > 0 or not FULL
