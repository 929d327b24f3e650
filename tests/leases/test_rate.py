"""Rate limits, as one process uses them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.leases.test_simulation_rate import most_over
from tests.leases.virtual import ScriptedStore, client, in_virtual_time

from moored.leases import Leases, StoreUnavailable, _gcra
from moored.leases._rate import TokenCache
from moored.testing import Sim

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.pure]


# -- the arithmetic ------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0), st.integers(1, 8), st.sampled_from((0.0, 0.0, 0.0, -0.5, -3600.0))
    ),
    min_size=1,
    max_size=60,
)


@given(STEPS, st.sampled_from((0.5, 3.0, 10.0)), st.integers(1, 6))
def test_no_window_exceeds_the_limit_even_if_the_clock_is_set_back(
    steps: list[tuple[float, int, float]], rate: float, burst: int
) -> None:
    true, shown = 0.0, 1_000_000.0
    full_at = None
    uses: list[float] = []
    for pause, tokens, step in steps:
        true += pause
        shown += pause + step
        full_at, taken = _gcra.take(full_at, shown, rate=rate, burst=burst, tokens=tokens)
        assert 0 <= taken.granted <= min(tokens, burst)
        assert (taken.wait > 0) or taken.granted == tokens
        uses += [true] * taken.granted
    assert not uses or most_over(uses, rate=rate, burst=burst) <= 1e-6


@given(STEPS, st.sampled_from((0.5, 3.0, 10.0)), st.integers(1, 6))
def test_the_wait_is_exact(steps: list[tuple[float, int, float]], rate: float, burst: int) -> None:
    now, full_at = 1000.0, None
    for pause, tokens, _ in steps:
        now += pause
        full_at, taken = _gcra.take(full_at, now, rate=rate, burst=burst, tokens=tokens)
        if taken.wait:
            options = {"rate": rate, "burst": burst, "tokens": 1}
            _, then = _gcra.take(full_at, now + taken.wait, **options)  # type: ignore[arg-type]
            assert then.granted == 1
            _, before = _gcra.take(full_at, now + 0.99 * taken.wait - 1e-5, **options)  # type: ignore[arg-type]
            assert before.granted == 0


def test_a_clock_that_is_set_back_only_empties_the_limit() -> None:
    full_at, _ = _gcra.take(None, 5000.0, rate=10.0, burst=5, tokens=5)
    full_at, taken = _gcra.take(full_at, 1000.0, rate=10.0, burst=5, tokens=5)
    assert taken.granted == 0
    assert taken.wait == pytest.approx(0.1, abs=1e-4)
    _, taken = _gcra.take(full_at, 1000.5, rate=10.0, burst=5, tokens=5)
    assert taken.granted >= 4


def test_the_cache_spends_tokens_that_expire_first_and_drops_stale_ones() -> None:
    cache = TokenCache()
    cache.put(2, until=20.0, every=2.0)
    cache.put(3, until=10.0, every=1.0)
    cache.put(0, until=30.0, every=1.0)
    assert cache.spend(1)
    assert not cache.spend(5)
    assert cache.count == 4
    assert cache.drop_stale(11.0) == 1
    assert cache.drop_stale(20.0) == 2
    assert cache.spend(1)
    assert not cache.spend(1)


# -- the client ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_burst_and_then_the_rate(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10)
        taken = 0
        while not (wait := await limit.take()):
            taken += 1
        assert taken == limit.store_burst == 5
        assert 0.0 < wait <= 0.1 + 1e-3
        await asyncio.sleep(wait)
        assert await limit.take() == 0.0
        assert leases.statistics().tokens == 6


@in_virtual_time
async def test_wait_keeps_to_the_rate(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10)
        for _ in range(25):
            await limit.wait()
        assert sim.now == pytest.approx(2.0, abs=0.01)
        assert store.calls["take"] <= 46


@in_virtual_time
async def test_waiters_are_served_in_order_and_fetched_for_together(sim: Sim) -> None:
    store = ScriptedStore()
    served: list[int] = []

    async def waiter(n: int) -> None:
        await limit.wait()
        served.append(n)

    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=100.0)
        await asyncio.gather(*(waiter(n) for n in range(50)))
        assert len(served) == 50
        assert store.calls["take"] <= 10
        if sim.seed == 0:  # the others let tasks overtake each other before they wait
            assert served == sorted(served)
            assert store.batches == [("take", 50)]


@in_virtual_time
async def test_batches_save_calls(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=100.0, batch=25)
        for _ in range(50):
            assert await limit.take() == 0.0
        assert store.calls["take"] == 2


@in_virtual_time
async def test_tokens_older_than_hold_are_not_used(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10, batch=5)
        assert limit.hold == 0.5
        assert await limit.take() == 0.0
        await asyncio.sleep(0.65)
        assert await limit.take() == 0.0
        assert store.calls["take"] == 1
        assert leases.statistics().tokens_stale == 1
        await asyncio.sleep(0.3)
        assert await limit.take() == 0.0
        assert store.calls["take"] == 2
        assert leases.statistics().tokens_stale == 3


@in_virtual_time
async def test_tokens_that_arrive_after_their_expiry_are_not_used(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10)
        store.takes = 0.95
        assert await limit.take() > 0
        assert leases.statistics().tokens == 0
        assert leases.statistics().tokens_stale >= 1
        assert limit._too_slow.endswith("configure a burst of at least 11")
        store.takes = 0.0
        await asyncio.sleep(1.0)
        assert await limit.take() == 0.0
        assert limit._too_slow == ""


@in_virtual_time
async def test_a_store_that_is_slower_than_hold_grants_tokens_within_the_limit(sim: Sim) -> None:
    store = ScriptedStore()
    uses: list[float] = []

    async def use(leases: Leases) -> None:
        limit = leases.rate_limit("connects", rate=100.0, burst=5)
        assert limit.hold < store.takes
        for _ in range(20):
            await limit.wait()
            uses.append(sim.now)

    store.takes = 0.03
    async with client(store) as one, client(store) as other, asyncio.timeout(60.0):
        await asyncio.gather(use(one), use(other), use(one))
    assert most_over(uses, rate=100.0, burst=5) <= 1e-6


@in_virtual_time
async def test_the_store_is_not_called_before_the_next_token_is_free(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=1.0, burst=2)
        assert await limit.take() == 0.0
        for _ in range(100):
            assert await limit.take() > 0
            await asyncio.sleep(0.005)
        assert store.calls["take"] <= 2
        assert repr(limit).startswith("<RateLimit 'connects': 1/s, burst 2, next in 0.")


@in_virtual_time
async def test_several_tokens_are_taken_at_once_or_not_at_all(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10)
        assert await limit.take(5) == 0.0
        wait = await limit.take(5)
        assert wait == pytest.approx(0.5, abs=0.01)
        await asyncio.sleep(wait)
        assert await limit.take(5) == 0.0
        await limit.wait(3)
        with pytest.raises(ValueError, match=r"n=6 must be between 1 and 5 \(burst=10 minus hold="):
            await limit.take(6)
        with pytest.raises(ValueError, match="n=0"):
            await limit.wait(0)


@in_virtual_time
async def test_in_an_outage_the_rate_applies_within_the_process(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store) as leases:
        limit = leases.rate_limit("connects", rate=10.0, burst=10, local_rate=2.0)
        store.break_down()
        for _ in range(10):
            assert await limit.take() == 0.0
        assert await limit.take() == pytest.approx(0.5, abs=0.01)
        assert leases.statistics().tokens_local == 10
        store.error = None
        await asyncio.sleep(3.0)
        assert await limit.take() == 0.0
        assert leases.statistics().tokens == 1


@in_virtual_time
async def test_in_an_outage_refuse_raises_store_unavailable(sim: Sim) -> None:
    store = ScriptedStore()
    async with client(store, on_unavailable="refuse") as leases:
        limit = leases.rate_limit("connects", rate=10.0)
        store.break_down()
        with pytest.raises(StoreUnavailable):
            await limit.take()
        with pytest.raises(StoreUnavailable):
            await limit.wait()
        store.error = None


@in_virtual_time
async def test_a_cancelled_waiter_does_not_block_the_next(sim: Sim) -> None:
    async with client(ScriptedStore()) as leases:
        limit = leases.rate_limit("connects", rate=1.0, burst=2)
        await limit.wait()
        first = asyncio.create_task(limit.wait())
        second = asyncio.create_task(limit.wait())
        await asyncio.sleep(0.1)
        first.cancel()
        await second
        assert sim.now <= 1.1
        assert limit._wanted == 0


def test_the_defaults_are_those_of_one_second() -> None:
    leases = Leases(ScriptedStore())
    limit = leases.rate_limit("connects")
    assert (limit.rate, limit.burst, limit.store_burst, limit.hold) == (100.0, 100, 50, 0.5)
    slow = leases.rate_limit("connects", rate=0.1)
    assert (slow.burst, slow.store_burst, slow.hold) == (2, 1, 1.0)
    assert repr(slow) == "<RateLimit 'connects': 0.1/s, burst 2, 0 tokens cached>"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": 0.0}, "rate=0.0 must be more than 0 per second"),
        ({"burst": 1}, "burst=1 must be at least 2: holding a token"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"hold": 0.0}, "hold=0.0 must be more than 0 seconds"),
        ({"local_rate": -1.0}, "local_rate=-1.0 must be at least 0"),
        ({"key": ""}, "key has 0 bytes"),
        ({"burst": 10, "batch": 6}, "burst=10 leaves 5 at once"),
        ({"burst": 10, "hold": 1.0}, "burst=10 leaves -90 at once"),
    ],
)
def test_mistakes(wrong: dict[str, object], words: str) -> None:
    leases = Leases(ScriptedStore())
    with pytest.raises(ValueError, match=words):
        leases.rate_limit(**{"key": "connects", **wrong})  # type: ignore[arg-type]
