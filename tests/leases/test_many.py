"""Ten thousand leases need few timers, and few calls per minute."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.leases.virtual import ScriptedStore, client

from moored.testing import Sim, SimLoop, run_one, scaled

MANY = scaled(10_000, least=2_500)


def _timers(sim: Sim) -> int:
    return sum(not timer[2].cancelled() for timer in sim.loop._timers)


async def ten_thousand(sim: Sim) -> dict[str, float]:
    """Take them over half a minute, and hold them for ten more; count what it costs."""
    store = ScriptedStore()
    set_up = 0
    call_at = SimLoop.call_at

    def counted(self: SimLoop, *args: Any, **options: Any) -> Any:
        nonlocal set_up
        set_up += 1
        return call_at(self, *args, **options)

    async with client(store) as leases:
        held = []
        for _ in range(MANY // 100):
            held += [await leases.acquire("db", limit=MANY) for _ in range(100)]
            await asyncio.sleep(0.3)
        assert None not in held
        sim.loop.call_at = counted.__get__(sim.loop)  # type: ignore[method-assign]
        before, begin = store.calls["renew"], sim.now
        most_timers = 0
        for _ in range(600):
            await asyncio.sleep(1.0)
            most_timers = max(most_timers, _timers(sim))
        del sim.loop.call_at
        assert all(lease is not None and lease.live for lease in held)
        minutes = (sim.now - begin) / 60
        return {
            "renewals a minute": (store.calls["renew"] - before) / minutes,
            "leases renewed a minute": leases.statistics().renewed / (sim.now / 60),
            "most timers at once": most_timers,
            "timers set a minute": (set_up - 600) / minutes,
            "largest batch": max(n for name, n in store.batches if name == "renew"),
        }


def test_renewals_are_batched() -> None:
    figures = run_one(ten_thousand, 1, drift=False).result()
    # 10,000 leases in batches of 250 are 40 calls, once a minute.
    assert MANY / 250 <= figures["renewals a minute"] <= 2 * MANY / 250, figures
    assert figures["largest batch"] <= 250, figures
    # The first deadline, and the next thing to do.
    assert figures["most timers at once"] <= 3, figures
    assert figures["timers set a minute"] <= 250, figures


def test_renewals_are_spread() -> None:
    """Leases that were taken together are not renewed together."""

    async def scenario(sim: Sim) -> list[int]:
        store = ScriptedStore()
        async with client(store) as leases:
            for _ in range(2000):
                await leases.acquire("db", limit=MANY)
            per_second = []
            for _ in range(240):
                before = sum(n for name, n in store.batches if name == "renew")
                await asyncio.sleep(1.0)
                per_second.append(sum(n for name, n in store.batches if name == "renew") - before)
            return per_second

    per_second = run_one(scenario, 1, drift=False).result()
    assert sum(per_second) >= 3 * 2000
    assert max(per_second) <= 2000 / 4
