"""Rate limits in DynamoDB: each token is granted once, in as few requests as possible."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.leases.dynamodb.conftest import Opener
from tests.leases.dynamodb.fault_injection import inject, items_of, lost, times

from moored.kernel import Clock
from moored.leases._dynamodb import _rate
from moored.leases._dynamodb._rate import plan_take
from moored.leases._dynamodb._time import ServerTime
from moored.leases.dynamodb import CounterStore, SlotStore

SECOND = 1_000_000_000


class Still(ServerTime):
    """A time that stands still until it is moved, forward or back."""

    def __init__(self) -> None:
        super().__init__(Clock.system())
        self.at = 1_800_000_000.0

    def likely(self) -> float:
        return self.at


@given(
    ahead=st.none() | st.integers(-10 * SECOND, 3 * SECOND),
    interval=st.integers(1, SECOND),
    burst=st.integers(1, 50),
    tokens=st.integers(1, 100),
)
def test_a_take_never_plans_more_than_the_limit_allows(
    ahead: int | None, interval: int, burst: int, tokens: int
) -> None:
    now = 100 * SECOND
    full_at = None if ahead is None else now + ahead
    wanted = plan_take(full_at, now, interval=interval, burst=burst, tokens=tokens)
    start = max(ahead or 0, 0)
    assert 0 <= wanted.granted <= min(tokens, burst)
    assert wanted.granted == 0 or start + wanted.cost <= burst * interval
    if wanted.granted < min(tokens, burst):
        assert start + wanted.cost + interval > burst * interval
    assert wanted.idle == (full_at is None or full_at < now)


async def take(store: SlotStore | CounterStore, tokens: int = 1, **options: Any) -> int:
    options = {"rate": 10.0, "burst": 5, **options}
    return (await store.take("connects", tokens=tokens, **options)).granted


async def stopped(open_table: Opener, time: Still, **parameters: Any) -> SlotStore | CounterStore:
    """A store whose clock is this one."""
    store = await open_table(**parameters)
    store.link.time = time
    return store


@pytest.mark.parametrize("layout", ["slots", "counter"])
async def test_concurrent_takes_never_get_the_same_token(open_table: Opener, layout: str) -> None:
    now = Still()
    stores = [await stopped(open_table, now, layout=layout) for _ in range(4)]
    taken = await asyncio.gather(*(take(stores[n % 4], burst=10) for n in range(30)))
    assert sum(taken) == 10
    now.at += 0.3  # three more tokens
    taken = await asyncio.gather(*(take(stores[n % 4], burst=10) for n in range(30)))
    assert sum(taken) == 3


async def test_a_clock_that_is_set_back_grants_no_extra_tokens(open_table: Opener) -> None:
    right, wrong = Still(), Still()
    first, second = await stopped(open_table, right), await stopped(open_table, wrong)
    assert await take(first, 5) == 5
    wrong.at -= 2.0
    assert await take(second, 5) == 0
    wrong.at += 4.0  # ahead by two seconds: it gets the tokens of that time, once
    assert await take(second, 5) == 5
    assert await take(first, 5) == 0
    wrong.at -= 2.0
    assert await take(second, 5) == 0
    right.at += 2.0
    assert await take(first, 5) == 0  # they have been given already
    right.at += 0.5
    assert await take(first, 5) == 5


async def test_an_implausible_full_at_is_reset(open_table: Opener) -> None:
    wild, right = Still(), Still()
    wild.at += 86400.0
    assert await take(await stopped(open_table, wild), 5) == 5
    store = await stopped(open_table, right)
    assert await take(store, 5) == 0  # taken to be empty as of now
    right.at += 0.5
    assert await take(store, 5) == 5


async def test_a_token_takes_one_request_and_a_known_refusal_none(open_table: Opener) -> None:
    now = Still()
    store = await stopped(open_table, now)
    before = store.link.requests.copy()
    for _ in range(5):
        assert await take(store) == 1
    assert dict(store.link.requests - before) == {"update_item": 5}
    before = store.link.requests.copy()
    for _ in range(20):
        granted, wait = await store.take("connects", rate=10.0, burst=5, tokens=1)
        assert granted == 0
        assert wait == pytest.approx(0.1, abs=1e-3)
    assert dict(store.link.requests - before) == {}


async def test_an_unknown_refusal_takes_one_request(open_table: Opener) -> None:
    now = Still()
    assert await take(await stopped(open_table, now), 5) == 5
    store = await stopped(open_table, now)
    before = store.link.requests.copy()
    assert await take(store) == 0
    assert dict(store.link.requests - before) == {"update_item": 1}


async def test_a_batch_takes_one_request(open_table: Opener) -> None:
    store = await stopped(open_table, Still())
    before = store.link.requests.copy()
    assert await take(store, 100, burst=100, rate=100.0) == 100
    assert dict(store.link.requests - before) == {"update_item": 1}


async def test_a_lost_response_loses_tokens_and_grants_none_twice(open_table: Opener) -> None:
    now = Still()
    store = await stopped(open_table, now)
    await inject(store, after=times(1, "update_item", lost()))
    granted = await take(store, 3)
    rest = await take(await stopped(open_table, now), 5)
    assert granted + rest <= 5


async def test_the_items_have_the_documented_attributes(open_table: Opener) -> None:
    store = await open_table()
    await store.take("connects", rate=10.0, burst=5, tokens=5)
    (item,) = (await items_of(store)).values()
    now = time.time()
    assert item.pop("full_at") == pytest.approx((now + 0.5) * SECOND, abs=5 * SECOND)
    assert item.pop("ttl_epoch") == pytest.approx(now + 7 * 86400, abs=10)
    assert item == {"pk": "moored_rate#connects", "slot": 0}


async def test_only_limits_in_use_are_remembered(
    open_table: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rate, "_REMEMBERED", 5)
    now = Still()
    store = await stopped(open_table, now)
    for n in range(12):
        await store.take(f"limit-{n}", rate=10.0, burst=1, tokens=1)
        now.at += 1.0
    assert len(store._rate._known) <= 6
