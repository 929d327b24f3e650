"""A channel does not grow older than it may, also if its renewal fails; in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.rpc import AsyncConnectionManager, ConnectionConfig
from holdfast.rpc._works import Works
from holdfast.testing import Sim, assert_caught, mutant, scaled, simulate

from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")

AGE = 20.0
#: The longest that a connect may take in that world.
CONNECT = 0.05


async def renewals_that_fail(sim: Sim) -> None:
    """For a while none can be made; soon after that, one is."""
    world = World(sim.rng)
    broken_until = AGE * sim.random(0.85, 1.5)

    def make(config: ConnectionConfig) -> Any:
        if 1.0 < sim.now < broken_until:
            raise OSError("a bad moment")
        return world.channel(config)

    async with AsyncConnectionManager(
        handler_factory=make, credentials=world.credentials, max_age=AGE
    ) as manager:
        handler = await manager.get_or_create(ConnectionConfig.from_uri(f"http://{ADDRESSES[0]}"))
        while handler.generation == 1:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        late = sim.now - max(broken_until, AGE)
        assert late <= AGE / 10 + CONNECT + 0.02, late
        began = sim.now
        while handler.generation == 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        assert 0.9 * AGE - 0.02 <= sim.now - began <= AGE + CONNECT + 0.02, "a new age"


def test_a_renewal_that_fails_is_tried_again_soon() -> None:
    simulate(renewals_that_fail, seeds=scaled(100, least=20))


def _waits_for_a_whole_age(self: Works, managed: Any, *, again: bool = False) -> None:
    _set_age_timer(self, managed)


_set_age_timer = Works._set_age_timer


def test_a_whole_age_of_waiting_is_noticed() -> None:
    planted = mutant(Works, "_set_age_timer", _waits_for_a_whole_age, name="a whole age")
    assert_caught(renewals_that_fail, planted, within=50, clean=3)
