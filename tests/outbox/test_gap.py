"""Out-of-order commits while listening connections are killed: the outbox misses nothing."""

from __future__ import annotations

from typing import Any

import pytest

from moored.testing import base_seed, scaled

from .gap import gap_run


@pytest.mark.every_loop
async def test_nothing_is_missed_or_repeated_while_connections_are_killed(
    url: str, record_property: Any
) -> None:
    events, kills = scaled(10_000, least=160), scaled(20, least=2)
    found = await gap_run(url, events, kills, base_seed())
    for name in (
        "missed",
        "duplicates",
        "bare_missed",
        "id_cursor_missed",
        "kills",
        "gaps",
        "untold",
    ):
        record_property(name, getattr(found, name))
    assert len(found.published) >= events
    assert (found.missed, found.duplicates) == (0, 0)
    assert found.orders["one"] == found.orders["two"] == sorted(found.orders["one"])
    assert found.kills >= kills
    assert found.gaps >= 1, "a subscriber of the listener is told"
    assert found.untold == 0, "of each gap"
    # The others show that the run was a hard one.
    assert found.id_cursor_missed > 0
    assert found.bare_missed > 0
