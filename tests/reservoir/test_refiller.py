"""The refiller, in virtual time and with a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import (
    Conn,
    Journal,
    Server,
    SqlError,
    pool_of,
    reservoir,
    wait_until,
)

from moored.reservoir import (
    CachedTokens,
    PoolClosed,
    ReservoirConfig,
)
from moored.reservoir._core import Core
from moored.testing import Sim, run_one


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of failures on purpose are not worth a line each."""
    caplog.set_level("CRITICAL", "moored")


def gaps(times: list[float]) -> list[float]:
    return [later - one for one, later in pairwise(times)]


def most_in(times: list[float], seconds: float) -> int:
    """The most in any window of so many seconds."""
    return max(sum(begin <= time <= begin + seconds for time in times) for begin in times)


# -- a life, drawn once ----------------------------------------------------------------------------


@in_virtual_time
async def test_each_lifetime_is_drawn_once(sim: Sim) -> None:
    server = Server()
    async with reservoir(server, ReservoirConfig(max_size=100)) as water:
        await wait_until(lambda: water.statistics().size == 100)
        items = list(water.core.items.values())
        lives = [item.expires - item.born for item in items]
        assert all(660.0 <= life < 780.0 for life in lives)
        assert max(lives) - min(lives) > 90.0
        assert len({round(life, 6) for life in lives}) == 100
        assert all(item.usable_until == item.expires - 45.0 for item in items)
        before = [(item.expires, item.usable_until) for item in items]
        for _ in range(50):
            conn = water.try_checkout()
            await asyncio.sleep(0.05)
            water.give_back(conn)
        assert [(item.expires, item.usable_until) for item in items] == before


def test_another_seed_gives_other_lifetimes() -> None:
    async def scenario(sim: Sim) -> float:
        async with reservoir(Server()) as water:
            await wait_until(lambda: water.statistics().size)
            (item,) = water.core.items.values()
            return item.expires - item.born

    lives = [run_one(scenario, seed).result() for seed in range(5)]
    assert len(set(lives)) == 5
    assert lives[0] == run_one(scenario, 0).result(), "by the clock's chance alone"


# -- after a failure -------------------------------------------------------------------------------


def backoff_of(error: BaseException, number: int, seed: int) -> list[float]:
    """The waits after each of so many failures, one connection at a time."""

    async def scenario(sim: Sim) -> list[float]:
        server = Server()
        server.error = error
        async with reservoir(server):
            await wait_until(lambda: len(server.times) > number, 3000.0)
        return [gap - server.takes for gap in gaps(server.times)]

    return run_one(scenario, seed).result()


def test_the_refiller_backs_off_with_jitter() -> None:
    waits = backoff_of(OSError("refused"), 8, seed=1)
    for base, wait in zip([0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0], waits, strict=True):
        assert base <= wait + 1e-6
        assert wait < 1.5 * base + 1e-6
    assert waits != backoff_of(OSError("refused"), 8, seed=2)


@pytest.mark.parametrize("sqlstate", ["53300", "53400"])
def test_the_refiller_backs_off_longer_when_throttled(sqlstate: str) -> None:
    waits = backoff_of(SqlError(sqlstate), 8, seed=1)
    for base, wait in zip([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], waits, strict=True):
        assert base <= wait + 1e-6
        assert wait < 1.5 * base + 1e-6


@in_virtual_time
async def test_a_success_resets_the_backoff(sim: Sim) -> None:
    server = Server()
    server.script.extend([OSError("refused")] * 6)
    async with reservoir(server) as water:
        await wait_until(lambda: water.statistics().size)
        assert water.upkeep.attempts.failing_for is None
        server.script.extend([OSError("refused"), None])
        water.discard(water.try_checkout())
        await wait_until(lambda: water.statistics().size)
        assert gaps(server.times)[-1] < 0.25 * 1.5 + 0.1, "as after a first failure"


@in_virtual_time
async def test_connects_that_fail_together_count_once_for_the_backoff(sim: Sim) -> None:
    server = Server()
    server.error = OSError("refused")
    async with reservoir(server, ReservoirConfig(max_size=8)) as water:
        await wait_until(lambda: len(server.times) >= 24)
        assert water.statistics().refill_failures["connect"] >= 16
        # Three rounds: the second after a quarter, the third after half a second.
        assert sim.now < 2 * (0.25 + 0.5)


@in_virtual_time
async def test_a_connect_that_began_before_the_failure_does_not_reset_the_backoff(sim: Sim) -> None:
    """The server said stop; that it then finished what it had begun is no word to the contrary."""
    server = Server()
    server.take.extend([0.01, 0.5, 0.6, 0.7, 0.8])
    server.script.append(SqlError("53400"))
    config = ReservoirConfig(max_size=20, max_in_flight=5)
    async with reservoir(server, config) as water:
        await wait_until(lambda: water.statistics().size == 4)
        assert sim.now < 0.9
        await wait_until(lambda: len(server.times) > 5)
        assert server.times[5] >= 0.01 + 1.0
        await wait_until(lambda: water.statistics().size == 20)


@in_virtual_time
async def test_a_waiter_never_gets_an_error_about_too_many_connections(sim: Sim) -> None:
    server = Server()
    server.script.extend([SqlError("53300"), SqlError("53400"), SqlError("53300")])
    async with pool_of(server) as pool:
        async with pool.connection(timeout=30.0) as conn:
            assert not conn.closed
        now = pool.statistics()
        assert dict(now.refill_failures) == {"connect": 3}
        assert (now.timeouts, now.refused, now.checkouts) == (0, 0, 1)
        assert 1.0 + 2.0 + 4.0 <= sim.now < 1.5 * 7.0 + 1.0


@in_virtual_time
async def test_reconnect_failed_is_called_once_when_reconnect_timeout_ends(sim: Sim) -> None:
    server = Server()
    server.error = OSError("refused")
    told: list[float] = []

    async def reconnect_failed() -> None:
        told.append(sim.now)

    async with reservoir(
        server, reconnect_failed=reconnect_failed, reconnect_timeout=20.0
    ) as water:
        await asyncio.sleep(100.0)
        assert len(told) == 1, "once for one outage"
        assert 20.0 <= told[0] < 20.1, "not only after the next pause of the backoff"
        server.error = None
        await wait_until(lambda: water.statistics().size)
        server.error = OSError("refused again")
        water.discard(water.try_checkout())
        await asyncio.sleep(60.0)
        assert len(told) == 2


# -- tokens ----------------------------------------------------------------------------------------


def token_maker() -> tuple[list[float], Callable[[], Any]]:
    calls: list[float] = []

    async def provider() -> str:
        calls.append(asyncio.get_running_loop().time())
        return f"token-{len(calls)}"

    return calls, provider


class Picky(Server):
    """Accepts only some passwords."""

    def __init__(self, *good: str, sqlstate: str | None = "28P01") -> None:
        super().__init__()
        self.good = set(good)
        self.refusal = SqlError(sqlstate, "password authentication failed")

    async def connect(self, password: str | None = None) -> Conn:
        self.error = None if password in self.good else self.refusal
        return await super().connect(password)


@pytest.mark.parametrize("sqlstate", ["28P01", "28000", None])
def test_a_refused_token_is_replaced_once(sqlstate: str | None) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        server = Picky("token-2", sqlstate=sqlstate)
        calls, provider = token_maker()
        async with reservoir(server, tokens=CachedTokens(provider)) as water:
            await wait_until(lambda: water.statistics().size)
            assert server.passwords == ["token-1", "token-2"]
            assert len(calls) == 2
            assert dict(water.statistics().refill_failures) == {}

    scenario()


@in_virtual_time
async def test_after_a_change_of_tokens_the_refused_one_is_replaced_once(sim: Sim) -> None:
    """The server has changed its mind: neither the newest nor the one before works."""
    server = Picky("token-1", "token-2")
    calls, provider = token_maker()
    async with reservoir(server, tokens=CachedTokens(provider)) as water:
        await wait_until(lambda: water.statistics().size)
        await asyncio.sleep(721.0)
        await wait_until(lambda: len(calls) == 2, 900.0)
        server.good = {"token-3"}
        water.discard(water.try_checkout())
        await wait_until(lambda: water.statistics().size)
        assert server.passwords[-2:] == ["token-2", "token-3"]
        assert dict(water.statistics().refill_failures) == {}


@in_virtual_time
async def test_a_second_refusal_is_a_failure(sim: Sim) -> None:
    server = Picky("never")
    calls, provider = token_maker()
    async with reservoir(server, tokens=CachedTokens(provider)) as water:
        await wait_until(lambda: water.statistics().refill_failures.get("connect", 0) == 1)
        assert server.passwords == ["token-1", "token-2"]
        assert len(calls) == 2


@in_virtual_time
async def test_the_retry_with_a_new_token_takes_another_turn(sim: Sim) -> None:
    server = Picky("never")
    _, provider = token_maker()
    config = ReservoirConfig(max_size=4, rate=2.0, burst=2)
    async with reservoir(server, config, tokens=CachedTokens(provider)):
        await asyncio.sleep(60.0)
    for seconds in (1.0, 5.0, 20.0):
        assert most_in(server.times, seconds) <= 2.0 * seconds + 2


@in_virtual_time
async def test_without_tokens_a_refusal_is_an_ordinary_failure(sim: Sim) -> None:
    server = Picky("never")
    async with reservoir(server) as water:
        await wait_until(lambda: water.statistics().refill_failures.get("connect", 0) == 1)
        assert server.passwords == [None]


# -- how many, and how fast ------------------------------------------------------------------------


@in_virtual_time
async def test_at_most_eight_connects_are_in_progress(sim: Sim) -> None:
    server = Server()
    server.takes = 1.0
    async with reservoir(server, ReservoirConfig(max_size=30)) as water:
        await wait_until(lambda: water.statistics().size == 30)
        assert server.most_under_way == 8
        assert server.most_alive == 30


@in_virtual_time
async def test_above_the_low_watermark_connections_are_opened_one_at_a_time(sim: Sim) -> None:
    server = Server()
    server.takes = 1.0
    config = ReservoirConfig(max_size=12, low_watermark=5)
    async with reservoir(server, config) as water:
        # Of the first eight three are more than the watermark, but were planned below it.
        await wait_until(lambda: water.statistics().size == 8)
        server.most_under_way = 0
        await wait_until(lambda: water.statistics().size == 12)
        assert server.most_under_way == 1
        assert sim.now == pytest.approx(5.0, abs=0.1)


@in_virtual_time
async def test_two_reservoirs_of_one_endpoint_share_one_budget(sim: Sim) -> None:
    server = Server()
    server.takes = 1.0
    config = ReservoirConfig(max_size=20, rate=10.0, burst=10)
    one, other = reservoir(server, config), reservoir(server, config)
    async with one, other:
        await wait_until(lambda: one.statistics().size + other.statistics().size == 40)
        assert server.most_under_way == 8
        for seconds in (1.0, 3.0):
            assert most_in(server.times, seconds) <= 10.0 * seconds + 10


def test_the_rate_holds_over_restarts_of_the_refiller() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        server = Server()
        server.takes = 0.05
        config = ReservoirConfig(max_size=60, rate=10.0, burst=4)
        water = reservoir(server, config)
        core: Core[Any] = water.core
        plan, crashes = core.plan, [0]

        def crash_now_and_then() -> int:
            if sim.random(0.0, 1.0) < 0.1:
                crashes[0] += 1
                raise RuntimeError("the refiller has a defect")
            return plan()

        core.plan = crash_now_and_then  # type: ignore[method-assign]
        async with water:
            await wait_until(lambda: water.statistics().size == 60, 600.0)
            assert crashes[0] >= 3
            assert len(server.times) == 60, "and nothing is opened twice"
        for seconds in (0.1, 1.0, 3.0):
            assert most_in(server.times, seconds) <= 10.0 * seconds + 4

    scenario()


@in_virtual_time
async def test_a_burst_of_callers_never_exceeds_max_size(sim: Sim) -> None:
    server = Server()
    async with reservoir(server, ReservoirConfig(max_size=6)) as water:
        for _ in range(100):
            await asyncio.sleep(0.02)
            for item in list(water.core.ready)[:2]:
                water.discard(item.conn)
        assert server.most_alive <= 6
        assert water.statistics().discards["bad"] > 20
        await wait_until(lambda: water.statistics().size == 6)


# -- the start and the end -------------------------------------------------------------------------


def starts(seed: int, waiting: bool = False) -> list[float]:
    async def scenario(sim: Sim) -> list[float]:
        server = Server()
        async with pool_of(server, max_size=5, start_stagger=10.0) as pool:
            if waiting:
                async with pool.connection(), pool.connection():
                    assert sim.now < 0.1
            await wait_until(lambda: pool.statistics().size == 5)
        return server.times

    return run_one(scenario, seed).result()


def test_the_first_connection_is_opened_at_once_and_the_others_staggered() -> None:
    begins = []
    for seed in range(8):
        first, *others = starts(seed)
        assert first == 0.0
        assert 0.0 < others[0] <= 10.0
        begins.append(others[0])
    assert max(begins) - min(begins) > 2.0, "each by a time of its own"


def test_a_waiter_ends_the_staggered_start() -> None:
    for seed in range(4):
        assert max(starts(seed, waiting=True)) < 0.1


@in_virtual_time
async def test_stop_closes_all_connections(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    async with journal.leases() as leases:
        async with reservoir(server, ReservoirConfig(max_size=5), leases=leases) as water:
            await wait_until(lambda: water.statistics().size == 5)
            conn = water.try_checkout()
        assert server.alive == 1, "that in use is closed when it comes back"
        with pytest.raises(PoolClosed):
            water.try_checkout()
        water.give_back(conn)
        await wait_until(lambda: server.alive == 0)
        await wait_until(lambda: len(journal.released) == 5)
        await asyncio.sleep(100.0)
        assert len(server.times) == 5, "nothing is opened after the stop"
        assert dict(water.statistics().discards) == {"closed": 5}


@in_virtual_time
async def test_stop_while_filling_closes_all_connections(sim: Sim) -> None:
    server = Server()
    server.takes = 5.0
    async with reservoir(server, ReservoirConfig(max_size=5)) as water:
        await asyncio.sleep(1.0)
        assert water.statistics().in_flight == 5
    assert sim.now == pytest.approx(1.0)
    assert (server.under_way, server.alive) == (0, 0)
    assert water.statistics().in_flight == 0


@in_virtual_time
async def test_connections_are_replaced_one_by_one_before_they_expire(sim: Sim) -> None:
    """A fill that was born together: within its life all are replaced, and never two at once."""
    server = Server()
    config = ReservoirConfig(max_size=10)
    async with reservoir(server, config) as water:
        await wait_until(lambda: water.statistics().size == 10)
        await asyncio.sleep(1500.0)
        later = server.times[10:]
        assert len(later) >= 20
        assert min(gaps(later)) > 0.9 * 61.5
        assert set(water.statistics().discards) <= {"replaced_ahead", "guard_on_scan"}
        assert server.most_alive == 10
