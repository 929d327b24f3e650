"""Tokens: renewed in time, in the background, and never later than they are good."""

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
    """Makes numbered tokens, as a test tells it."""

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
async def test_the_next_one_is_fetched_at_80_percent_of_life(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    assert await tokens.get() == "token-1"
    await asyncio.sleep(1.0)
    assert await tokens.get() == "token-1"
    await asyncio.sleep(2000.0)
    assert provider.calls == [0.0, 720.0], "of the second one nobody has made use"
    tokens.close()


@in_virtual_time
async def test_it_is_never_fetched_in_the_callers_path(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    provider.takes = 5.0
    for _ in range(300):
        await asyncio.sleep(10.0)
        before = sim.now
        token = await tokens.get()
        assert sim.now == before, "nobody waits for the provider"
        assert token == f"token-{sum(when + 5.0 < sim.now for when in provider.calls[1:]) + 1}"
    assert provider.calls == [0.0, *(720.0 * n for n in range(1, len(provider.calls)))]
    tokens.close()


@in_virtual_time
async def test_life_counts_from_the_question_not_from_the_answer(sim: Sim) -> None:
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
async def test_no_refresh_when_nobody_asked(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await asyncio.sleep(3000.0)
    assert provider.calls == [0.0]
    assert await tokens.get() == "token-2"
    tokens.close()


@in_virtual_time
async def test_a_late_question_fetches_the_next_one_in_the_background(sim: Sim) -> None:
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
async def test_a_close_ends_a_refresh_under_way(sim: Sim) -> None:
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
async def test_the_end_of_the_credentials_caps_it(sim: Sim) -> None:
    provider = Provider()
    provider.life = 100.0
    tokens = CachedTokens(provider, lifetime=900.0)
    await tokens.get()
    await tokens.get()
    await asyncio.sleep(81.0)
    assert provider.calls == [0.0, 80.0]
    tokens.close()


@in_virtual_time
async def test_the_lifetime_caps_what_the_provider_says(sim: Sim) -> None:
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
async def test_one_that_is_over_when_it_comes_is_no_token(sim: Sim) -> None:
    provider = Provider()
    provider.life = -1.0
    tokens = CachedTokens(provider)
    with pytest.raises(TokenError, match="over already: check its clock"):
        await tokens.get()
    tokens.close()


# -- failing -------------------------------------------------------------------------------------


@in_virtual_time
async def test_while_the_provider_fails_the_old_one_is_given(sim: Sim) -> None:
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
    assert "could not be refreshed (no route (OSError)); the old one is good for: " in caplog.text
    assert "1 m 40 s" in caplog.text
    assert "token-1" not in caplog.text


@in_virtual_time
async def test_a_first_failure_goes_to_all_who_wait_for_it(sim: Sim) -> None:
    provider = Provider()
    provider.error, provider.takes = OSError("no route"), 1.0
    tokens = CachedTokens(provider)
    outcomes = await asyncio.gather(*(tokens.get() for _ in range(5)), return_exceptions=True)
    assert outcomes == [provider.error] * 5
    assert (len(provider.calls), tokens.failures) == (1, 1)


@in_virtual_time
async def test_a_provider_that_does_not_answer(sim: Sim) -> None:
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
async def test_what_is_no_token(value: Any) -> None:
    async def provider() -> Any:
        return value

    tokens = CachedTokens(provider)
    with pytest.raises(
        TokenError, match=r"the token provider returned .*: return a text"
    ) as caught:
        await tokens.get()
    assert "tomorrow" not in str(caught.value)
    assert tokens.failures == 1


# -- one at a time -------------------------------------------------------------------------------


@in_virtual_time
async def test_all_who_ask_at_once_share_one_fetch(sim: Sim) -> None:
    provider = Provider()
    provider.takes = 1.0
    tokens = CachedTokens(provider)
    assert await asyncio.gather(*(tokens.get() for _ in range(20))) == ["token-1"] * 20
    assert (provider.calls, tokens.fetched) == ([0.0], 1)
    tokens.close()


@in_virtual_time
async def test_one_who_gives_up_leaves_the_others_alone(sim: Sim) -> None:
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
async def test_many_questions_after_80_percent_make_one_refresh(sim: Sim) -> None:
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
async def test_one_that_was_rejected_is_replaced(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    tokens.reject(await tokens.get())
    assert await tokens.get() == "token-2"
    assert (tokens.rejected, tokens.fetched) == (1, 2)
    tokens.close()


@in_virtual_time
async def test_after_a_change_of_tokens_a_rejected_one_is_replaced_by_a_new_one(sim: Sim) -> None:
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
async def test_where_no_new_one_can_be_had_the_one_before_is_better_than_none(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider)
    await tokens.get()
    await tokens.get()
    await asyncio.sleep(730.0)
    tokens.reject(await tokens.get())
    provider.error = OSError("no route")
    assert await tokens.get() == "token-1"
    tokens.close()


@in_virtual_time
async def test_one_rejected_by_many_is_fetched_once(sim: Sim) -> None:
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


@in_virtual_time
async def test_a_few_are_kept_and_no_more(sim: Sim) -> None:
    provider = Provider()
    tokens = CachedTokens(provider, keep=2)
    for _ in range(4):
        await tokens.get()
        await asyncio.sleep(721.0)
    assert len(tokens._kept) == 2
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


async def test_a_slow_sync_provider_does_not_hold_up_the_loop() -> None:
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


async def test_what_a_sync_provider_raises_is_raised() -> None:
    def provider() -> str:
        raise LookupError("no credentials")

    tokens = CachedTokens(provider)
    with pytest.raises(LookupError, match="no credentials"):
        await tokens.get()


async def test_a_sync_provider_that_runs_out_says_so() -> None:
    """A StopIteration cannot be raised where somebody awaits."""
    tokens = CachedTokens(iter(["one"]).__next__, timeout=10.0)
    assert await tokens.get() == "one"
    tokens.reject("one")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await tokens.get()
    assert time.monotonic() - began < 5.0
    tokens.close()


async def test_a_sync_provider_may_return_what_must_be_awaited() -> None:
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
async def test_tokens_in_words(sim: Sim) -> None:
    tokens = CachedTokens(Provider())
    assert repr(tokens) == "<CachedTokens: none yet, 0 fetched, 0 failed>"
    await tokens.get()
    assert repr(tokens) == "<CachedTokens: good for 15 m 0 s, 1 fetched, 0 failed>"
    tokens.close()


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"^CachedTokens: ") as caught:
        CachedTokens(Provider(), lifetime=0.0, refresh_at=1.0, keep=0, timeout=-1.0)
    for text in ("lifetime=0.0 ", "refresh_at=1.0 ", "keep=0 ", "timeout=-1.0 "):
        assert text in str(caught.value)
