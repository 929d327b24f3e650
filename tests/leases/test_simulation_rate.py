"""A shared rate limit with late and lost responses, paused processes and wrong clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from tests.leases.faulty_network import FaultyNetwork, NetworkFaults
from tests.mutants import planted_defects

from moored.kernel import Clock
from moored.leases import Leases, MemoryStore, Policy, RateLimit, StoreUnavailable, Taken, _gcra
from moored.leases._rate import TokenCache
from moored.testing import Host, Mutant, Sim, assert_caught, mutant, scaled, simulate

pytestmark = pytest.mark.usefixtures("quiet")

RATE, BURST = 10.0, 10
HOSTS = 3
TROUBLE_UNTIL = 8.0
#: The longest storm, and an attempt to open that began in it.
RECOVERY = 8.0
POLICY = Policy(on_unavailable="refuse", timeout=1.0)


class Takers:
    """Hosts that use tokens as fast as they get them."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.faults = NetworkFaults()
        self.uses: list[float] = []
        # The wall clock, as the real stores have it: it can go back.
        self.server = sim.host("store")
        self.store = MemoryStore(clock=Clock(self.server.clock.wall, self.server.clock.wall))
        self._hoarding = sim.rng.random() < 0.5
        self.hosts = [sim.host(f"host-{n}", self._main(n)) for n in range(HOSTS)]

    def _main(self, number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def main() -> None:
            while True:
                line = FaultyNetwork(self.store, self.sim, self.faults)
                try:
                    async with Leases(line, policy=POLICY) as leases:
                        await self._use(leases, number)
                except StoreUnavailable:
                    await asyncio.sleep(0.2)

        return main

    async def _use(self, leases: Leases, number: int) -> None:
        if self._hoarding:
            limit = leases.rate_limit("connects", rate=RATE, burst=BURST, batch=5)
            await self._hoards(limit, 0.5 * (number + 1))
        else:
            batch = self.sim.rng.choice((1, 5))
            limit = leases.rate_limit("connects", rate=RATE, burst=BURST, batch=batch)
            await self._waits(limit)

    async def _waits(self, limit: RateLimit) -> None:
        """Use a token whenever there is one."""
        while True:
            await limit.wait()
            self.uses.append(self.sim.now)

    async def _hoards(self, limit: RateLimit, phase: float) -> None:
        """Fetch a batch, each at its own time; and use it when all the others do so too."""
        while True:
            await asyncio.sleep((phase - self.sim.now) % 2.0)
            if not await limit.take():
                self.uses.append(self.sim.now)
            await asyncio.sleep(2.0 - self.sim.now % 2.0)
            while not await limit.take():
                self.uses.append(self.sim.now)

    def plan_trouble(self) -> None:
        rng = self.sim.rng
        for _ in range(rng.randint(1, 4)):
            kind = rng.choice((self.storm, self.pause, self.crash, self.step_back))
            self.sim.at(rng.uniform(0.5, TROUBLE_UNTIL), kind, rng.choice(self.hosts))

    async def storm(self, host: Host) -> None:
        rng = self.sim.rng
        kind = rng.choice(("slow", "deaf", "refused"))
        if kind == "slow":
            self.faults.there = self.faults.back = (0.0, rng.choice((0.1, 0.4, 0.8)))
        elif kind == "deaf":
            self.faults.lost_answers = 0.5
        else:
            self.faults.refused = True
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        for name, value in vars(NetworkFaults()).items():
            setattr(self.faults, name, value)

    async def pause(self, host: Host) -> None:
        host.pause()
        await asyncio.sleep(self.sim.random(0.1, 3.0))
        host.resume()

    async def crash(self, host: Host) -> None:
        host.kill()
        await asyncio.sleep(self.sim.random(0.1, 3.0))
        host.restart()

    def step_back(self, host: Host) -> None:
        self.server.wall_step(-self.sim.rng.choice((0.1, 1.0, 3600.0)))


def most_over(uses: Sequence[float], *, rate: float, burst: int) -> float:
    """By how many tokens the worst window exceeds rate x window + burst; negative if none does."""
    worst, lowest = float("-inf"), float("inf")
    for number, at in enumerate(sorted(uses)):
        # A window from the i-th use to the j-th holds j - i + 1 of them.
        lowest = min(lowest, number - rate * at)
        worst = max(worst, number - rate * at - lowest + 1 - burst)
    return worst


async def shared_rate_on_a_bad_day(sim: Sim) -> float:
    """No window exceeds the limit; and after the faults, tokens are granted again."""
    takers = Takers(sim)
    takers.plan_trouble()
    await asyncio.sleep(TROUBLE_UNTIL + RECOVERY)
    before = len(takers.uses)
    await asyncio.sleep(4.0)
    over = most_over(takers.uses, rate=RATE, burst=BURST)
    assert over <= 1e-6, f"{over:.3f} tokens too many in a window"
    flow = len(takers.uses) - before
    assert flow >= (0.2 if takers._hoarding else 0.8) * RATE * 4.0, f"{flow} tokens in 4 s"
    return over


def test_no_window_exceeds_the_rate_limit() -> None:
    simulate(shared_rate_on_a_bad_day, scaled(1000, least=5))


def _keeps_for_ever(self: TokenCache, now: float) -> int:
    """Tokens are good for ever."""
    return 0


def _mints_again(full_at: float | None, now: float, **options: Any) -> tuple[float, Taken]:
    """A clock that goes back finds a limit that is full."""
    return _take(
        None if full_at is None or full_at > now + BURST / RATE else full_at, now, **options
    )


def _waits_for_the_old_time(
    full_at: float | None, now: float, **options: Any
) -> tuple[float, Taken]:
    """A clock that goes back gives nothing until it is where it was."""
    if full_at is not None and full_at > now + BURST / RATE:
        return full_at, Taken(0, full_at - now)
    return _take(full_at, now, **options)


async def _fetch_late(self: RateLimit) -> None:
    """The life of a token counts from the answer, and not from the request."""
    held, self.hold = self.hold, self.hold + 1.0
    try:
        await _fetch(self)
    finally:
        self.hold = held


_take, _fetch = _gcra.take, RateLimit._fetch

MUTANTS = [
    mutant(TokenCache, "drop_stale", _keeps_for_ever, name="tokens that are kept for ever"),
    mutant(RateLimit, "_fetch", _fetch_late, name="tokens that live too long"),
    mutant(_gcra, "take", _mints_again, name="tokens minted again by a clock that goes back"),
    mutant(_gcra, "take", _waits_for_the_old_time, name="a limit that waits for the old time"),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(
        MUTANTS,
        "tokens minted again by a clock that goes back",
        "a limit that waits for the old time",
    ),
)
def test_planted_defects_are_detected(planted: Mutant) -> None:
    caught = assert_caught(shared_rate_on_a_bad_day, planted, within=400, clean=0)
    assert isinstance(caught.error, AssertionError), caught
