"""The cache of recent sends: its size, its lifetime, and its counters."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.sessions._protocol import Outgoing
from moored.sessions.sending._retry_cache import MemoryRetryCache, RetryCache
from moored.testing import Sim, simulate

pytestmark = pytest.mark.pure


class ManualClock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def sent(name: str) -> Outgoing:
    return Outgoing(name, "bob", b"hello")


def test_cached_send_is_returned_for_five_minutes() -> None:
    time = ManualClock()
    cache = MemoryRetryCache(now=time)
    assert isinstance(cache, RetryCache)
    one = sent("one")
    cache.put("one", one)
    time.now = 299.9
    assert cache.get("one") is one
    assert cache.get("two") is None
    time.now = 300.0
    assert cache.get("one") is None
    assert (len(cache), cache.expired, cache.evicted) == (0, 1, 0)


def test_oldest_send_is_evicted_however_often_it_was_read() -> None:
    cache = MemoryRetryCache(now=ManualClock())
    for number in range(513):
        cache.put(f"{number}", sent(f"{number}"))
        assert number > 511 or cache.get("0") is not None
    assert cache.get("0") is None
    assert cache.get("1") is not None
    assert (len(cache), cache.evicted, cache.expired) == (512, 1, 0)
    assert repr(cache) == "<MemoryRetryCache: 512 of 512, 1 evicted, 0 expired>"


def test_send_that_is_put_again_is_the_newest() -> None:
    time = ManualClock()
    cache = MemoryRetryCache(2, 10.0, now=time)
    cache.put("a", sent("a"))
    cache.put("b", sent("b"))
    time.now = 5.0
    again = sent("a")
    cache.put("a", again)
    assert cache.evicted == 0
    cache.put("c", sent("c"))
    assert cache.get("b") is None
    time.now = 14.9
    assert cache.get("a") is again
    cache.expire()
    assert len(cache) == 2
    time.now = 15.0
    cache.expire()
    assert (len(cache), cache.expired) == (0, 2)


@given(st.lists(st.tuples(st.sampled_from("pppg"), st.integers(0, 9), st.integers(0, 4))))
def test_cache_agrees_with_a_simple_model(steps: list[tuple[str, int, int]]) -> None:
    time = ManualClock()
    cache = MemoryRetryCache(4, 10.0, now=time)
    model: OrderedDict[str, tuple[float, Outgoing]] = OrderedDict()
    gone = 0
    for step, number, later in steps:
        time.now += later
        for name in [name for name, (end, _) in model.items() if end <= time.now]:
            del model[name]
            gone += 1
        name = str(number)
        if step == "p":
            outgoing = sent(name)
            cache.put(name, outgoing)
            model.pop(name, None)
            model[name] = (time.now + 10.0, outgoing)
            if len(model) > 4:
                model.popitem(last=False)
                gone += 1
        else:
            assert cache.get(name) is model.get(name, (0, None))[1]
        assert len(cache) == len(model)
        assert cache.evicted + cache.expired == gone


def test_cache_follows_virtual_time_in_the_simulator() -> None:
    async def scenario(sim: Sim) -> None:
        cache = MemoryRetryCache()
        cache.put("one", sent("one"))
        await asyncio.sleep(299)
        assert cache.get("one") is not None
        await asyncio.sleep(2)
        assert cache.get("one") is None

    simulate(scenario, 5)


def test_invalid_size_and_lifetime_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size=0 .*; seconds=0"):
        MemoryRetryCache(0, 0)
