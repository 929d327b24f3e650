"""Cached tokens: renewed in the background before they expire."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.kernel.fake_clock import NOON, FakeClock
from tests.leases.virtual import in_virtual_time

from moored.reservoir import CachedTokens, Token, TokenError
from moored.testing import Sim

pytestmark = pytest.mark.pure


class Provider:
    """Returns numbered tokens, as a test sets it."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.takes = 0.0
        self.error: Exception | None = None
        #: How long a token is good, by what it says itself.
        self.life: float | None = None
        self.wall = 0.0

    async def __call__(self) -> Token:
        loop = asyncio.get_running_loop()
        self.calls.append(loop.time())
        number = len(self.calls)
        ends = None if self.life is None else loop.clock.wall() + self.life  # type: ignore[attr-defined]
        if self.takes:
            await asyncio.sleep(self.takes)
        if self.error is not None:
            raise self.error
        return Token(f"token-{number}", ends)


# -- when it is refreshed ------------------------------------------------------------------------


@in_virtual_time
async def test_the_next_token_is_fetched_at_80_percent_of_the_lifetime(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    assert await tokens.get() == "token-1"
    await asyncio.sleep(1.0)
    assert await tokens.get() == "token-1"
    await asyncio.sleep(2000.0)
    assert provider.calls == [0.0, 720.0], "the second token was not used"
    tokens.close()


@in_virtual_time
async def test_a_refresh_never_delays_a_caller(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    provider.takes = 5.0
    for _ in range(300):
        await asyncio.sleep(10.0)
        before = sim.now
        token = await tokens.get()
        assert sim.now == before, "no caller waits for the provider"
        assert token == f"token-{sum(when + 5.0 < sim.now for when in provider.calls[1:]) + 1}"
    assert provider.calls == [0.0, *(720.0 * n for n in range(1, len(provider.calls)))]
    tokens.close()


@in_virtual_time
async def test_the_lifetime_counts_from_the_request(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 10.0
    tokens = CachedTokens(provider, lifetime=100.0)
    await tokens.get()
    assert sim.now == 10.0
    await tokens.get()
    await asyncio.sleep(71.0)
    assert provider.calls == [0.0, 80.0]
    tokens.close()


@in_virtual_time
async def test_an_unused_token_is_not_refreshed(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await asyncio.sleep(3000.0)
    assert provider.calls == [0.0]
    assert await tokens.get() == "token-2"
    tokens.close()


@in_virtual_time
async def test_a_late_get_refreshes_in_the_background(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await asyncio.sleep(800.0)
    provider.takes = 1.0
    assert await tokens.get() == "token-1"
    assert sim.now == 800.0
    await asyncio.sleep(2.0)
    assert await tokens.get() == "token-2"
    tokens.close()


@in_virtual_time
async def test_after_the_close_nothing_is_fetched_in_the_background(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await tokens.get()
    tokens.close()
    await asyncio.sleep(800.0)
    assert provider.calls == [0.0]


@in_virtual_time
async def test_close_cancels_a_refresh_in_progress(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await asyncio.sleep(800.0)
    provider.takes = 5.0
    await tokens.get()
    await asyncio.sleep(1.0)
    assert len(provider.calls) == 2
    tokens.close()
    await asyncio.sleep(10.0)
    assert tokens.fetched == 1


# -- how long it is good -------------------------------------------------------------------------


@in_virtual_time
async def test_expires_at_caps_the_lifetime(sim: Sim) -> None:
    provider = Provider()
    provider.life = 100.0
    tokens = CachedTokens(provider, lifetime=900.0)
    await tokens.get()
    await tokens.get()
    await asyncio.sleep(81.0)
    assert provider.calls == [0.0, 80.0]
    tokens.close()


@in_virtual_time
async def test_lifetime_caps_expires_at(sim: Sim) -> None:
    provider = Provider()
    provider.life = 100_000.0
    tokens = CachedTokens(provider, lifetime=900.0)
    await tokens.get()
    await tokens.get()
    await asyncio.sleep(721.0)
    assert provider.calls == [0.0, 720.0]
    tokens.close()


@in_virtual_time
async def test_a_step_of_the_wall_clock_changes_nothing(sim: Sim) -> None:
    provider = Provider()
    provider.life = 100.0
    tokens = CachedTokens(provider)
    await tokens.get()
    sim.wall_step(-100_000.0)
    await asyncio.sleep(101.0)
    assert await tokens.get() == "token-2"
    tokens.close()


@in_virtual_time
async def test_an_expired_token_of_the_provider_is_an_error(sim: Sim) -> None:
    provider = Provider()
    provider.life = -1.0
    tokens = CachedTokens(provider)
    with pytest.raises(TokenError, match="returned an expired token: check the clocks"):
        await tokens.get()
    tokens.close()


# -- failing -------------------------------------------------------------------------------------


@in_virtual_time
async def test_while_the_provider_fails_the_current_token_is_returned(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    provider.error = OSError("no route")
    for _ in range(8):
        await asyncio.sleep(110.0)
        assert await tokens.get() == "token-1"
    assert tokens.failures >= 1
    await asyncio.sleep(20.0)
    assert sim.now == 900.0
    with pytest.raises(OSError, match="no route"):
        await tokens.get()
    provider.error = None
    assert (await tokens.get()).startswith("token-")
    tokens.close()


def test_a_failed_refresh_is_logged_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        provider = Provider()
        tokens = CachedTokens(provider)
        await tokens.get()
        provider.error = OSError("no route")
        await asyncio.sleep(800.0)
        await tokens.get()
        await asyncio.sleep(1.0)
        tokens.close()

    with caplog.at_level(logging.DEBUG, "moored.reservoir"):
        scenario()
    failed = "fetching a new token failed (no route (OSError)); the current one is valid for: "
    assert failed in caplog.text
    assert "1 m 40 s" in caplog.text
    assert "token-1" not in caplog.text


@in_virtual_time
async def test_a_failed_first_fetch_is_raised_to_all_waiters(sim: Sim) -> None:
    provider = Provider()
    provider.error, provider.takes = OSError("no route"), 1.0
    tokens = CachedTokens(provider)
    outcomes = await asyncio.gather(*(tokens.get() for _ in range(5)), return_exceptions=True)
    assert outcomes == [provider.error] * 5
    assert (len(provider.calls), tokens.failures) == (1, 1)


@in_virtual_time
async def test_a_provider_that_does_not_answer_is_a_token_error(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 1000.0
    tokens = CachedTokens(provider, timeout=7.0)
    with pytest.raises(TokenError, match="did not answer within 7 s"):
        await tokens.get()
    assert (sim.now, tokens.failures) == (7.0, 1)


@pytest.mark.parametrize(
    "value",
    [None, b"token", "", 5, ("token", 1.0), Token(""), Token(b"x"), Token("x", "tomorrow")],  # type: ignore[arg-type]
)
async def test_an_invalid_token_is_refused(value: Any) -> None:
    async def provider() -> Any:
        return value

    tokens = CachedTokens(provider)
    with pytest.raises(TokenError, match=r"the token provider returned .*: return a str") as caught:
        await tokens.get()
    assert "tomorrow" not in str(caught.value)
    assert tokens.failures == 1


# -- one at a time -------------------------------------------------------------------------------


@in_virtual_time
async def test_concurrent_callers_share_one_fetch(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 1.0
    tokens = CachedTokens(provider)
    assert await asyncio.gather(*(tokens.get() for _ in range(20))) == ["token-1"] * 20
    assert (provider.calls, tokens.fetched) == ([0.0], 1)
    tokens.close()


@in_virtual_time
async def test_a_cancelled_caller_does_not_cancel_the_fetch_of_others(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 1.0
    tokens = CachedTokens(provider)
    hasty, patient = (asyncio.create_task(tokens.get()) for _ in range(2))
    await asyncio.sleep(0.5)
    hasty.cancel()
    assert await patient == "token-1"
    assert provider.calls == [0.0]
    tokens.close()


@in_virtual_time
async def test_many_calls_after_80_percent_start_one_refresh(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await asyncio.sleep(800.0)
    provider.takes = 10.0
    for _ in range(50):
        assert await tokens.get() == "token-1"
        await asyncio.sleep(0.1)
    assert len(provider.calls) == 2
    tokens.close()


# -- rejected ------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_rejected_token_is_replaced(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    tokens.reject(await tokens.get())
    assert await tokens.get() == "token-2"
    assert (tokens.rejected, tokens.fetched) == (1, 2)
    tokens.close()


@in_virtual_time
async def test_a_rejected_token_is_replaced_by_a_new_one_not_by_an_older_one(sim: Sim) -> None:
    """Not by the one before it, which may be as bad."""
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await tokens.get()
    await asyncio.sleep(730.0)
    assert await tokens.get() == "token-2"
    tokens.reject("token-2")
    assert await tokens.get() == "token-3"
    assert await tokens.get() == "token-3", "once"
    tokens.close()


@in_virtual_time
async def test_a_token_rejected_many_times_is_replaced_once(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 0.5
    tokens = CachedTokens(provider)
    first = await tokens.get()

    async def refused(later: float) -> str:
        await asyncio.sleep(later)
        tokens.reject(first)
        return await tokens.get()

    later = [0.0, 0.1, 0.2, 1.0, 2.0]
    assert await asyncio.gather(*map(refused, later)) == ["token-2"] * 5
    assert (tokens.fetched, tokens.rejected) == (2, 1)
    tokens.close()


# -- sync and async providers --------------------------------------------------------------------


async def test_a_sync_provider_is_called_in_a_thread() -> None:
    names = []

    def provider() -> str:
        names.append(threading.current_thread().name)
        return "secret"

    tokens = CachedTokens(provider)
    assert await tokens.get() == "secret"
    assert names == ["moored-token"]
    tokens.close()


async def test_a_slow_sync_provider_does_not_block_the_loop() -> None:
    may_end = threading.Event()

    def provider() -> str:
        assert may_end.wait(10.0)
        return "secret"

    tokens = CachedTokens(provider)
    waiting = asyncio.create_task(tokens.get())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    assert await waiting == "secret"
    tokens.close()


async def test_an_error_of_a_sync_provider_is_raised() -> None:
    def provider() -> str:
        raise LookupError("no credentials")

    tokens = CachedTokens(provider)
    with pytest.raises(LookupError, match="no credentials"):
        await tokens.get()


async def test_a_stop_iteration_of_a_sync_provider_is_an_error() -> None:
    """A StopIteration cannot be raised through an await."""
    tokens = CachedTokens(iter(["one"]).__next__, timeout=10.0)
    assert await tokens.get() == "one"
    tokens.reject("one")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await tokens.get()
    assert time.monotonic() - began < 5.0
    tokens.close()


async def test_a_sync_provider_may_return_an_awaitable() -> None:
    async def later() -> Token:
        return Token("secret")

    def provider() -> Awaitable[Token]:
        return later()

    tokens = CachedTokens(provider)
    assert await tokens.get() == "secret"
    tokens.close()


async def test_a_coroutine_function_is_called_in_the_loop() -> None:
    async def provider() -> str:
        assert threading.current_thread() is threading.main_thread()
        return "secret"

    tokens = CachedTokens(provider)
    assert await tokens.get() == "secret"
    tokens.close()


async def test_a_clock_can_be_passed_in() -> None:
    clock = FakeClock()
    given = []

    async def provider() -> Token:
        given.append(clock.now)
        return Token(f"token-{len(given)}", NOON + clock.now + 50.0)

    tokens = CachedTokens(provider, clock=clock)
    assert await tokens.get() == "token-1"
    clock.advance(49.9)
    assert await tokens.get() == "token-1"
    tokens.close()
    clock.advance(0.1)
    assert await tokens.get() == "token-2"
    tokens.close()


# -- for people ----------------------------------------------------------------------------------


def test_a_token_is_never_shown() -> None:
    assert repr(Token("secret", 5.0)) == "Token('…', expires_at=5.0)"
    assert "secret" not in f"{Token('secret')}"


@in_virtual_time
async def test_repr_of_cached_tokens(sim: Sim) -> None:
    tokens = CachedTokens(Provider())
    assert repr(tokens) == "<CachedTokens: none yet, 0 fetched, 0 failed>"
    await tokens.get()
    assert repr(tokens) == "<CachedTokens: valid for 15 m 0 s, 1 fetched, 0 failed>"
    tokens.close()


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"^CachedTokens: ") as caught:
        CachedTokens(Provider(), lifetime=0.0, refresh_at=1.0, timeout=-1.0)
    for text in ("lifetime=0.0 ", "refresh_at=1.0 ", "timeout=-1.0 "):
        assert text in str(caught.value)
