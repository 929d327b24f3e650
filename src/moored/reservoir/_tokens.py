"""Tokens that are passwords for a while: kept, renewed in time, and never fetched by a caller."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias

from moored.kernel import (
    Clock,
    SingleFlight,
    Timers,
    describe,
    duration,
    refuse,
    run_callback,
    unmet,
)

from ._errors import TokenError

__all__ = ["CachedTokens", "Token", "TokenProvider", "Tokens"]

log = logging.getLogger("moored.reservoir")

#: How long a token is good if nobody says: what AWS gives by default.
LIFETIME = 900.0


class Token(NamedTuple):
    """A password that is good for a while."""

    value: str
    #: Until when, in seconds since 1970; None, if the provider does not know.
    expires_at: float | None = None

    def __repr__(self) -> str:
        # A token ends up in logs sooner or later; its value must not.
        return f"Token('…', expires_at={self.expires_at!r})"


class TokenProvider(Protocol):
    """Anything that can be called for a new token, with or without `await`.

    One that blocks is called in a thread.
    """

    def __call__(self) -> str | Token | Awaitable[str | Token]:
        """A new token."""


class Tokens(Protocol):
    """Where a refiller gets its tokens."""

    async def get(self) -> str:
        """A token that is good now."""

    def reject(self, value: str) -> None:
        """The server did not accept this one: do not give it again."""


Provider: TypeAlias = Callable[[], str | Token | Awaitable[str | Token]]


class CachedTokens:
    """Keeps a few tokens of one identity, and fetches the next one before the last has ended.

    At `refresh_at` of a token's life the next one is fetched in the background, if any was asked
    for since the last; meanwhile, and while the provider fails, the old one is given as long as it
    is good. Only where there is none does `get()` wait.

    :param provider: makes a token; sync (called in a thread) or async. It may return a `Token` to
        say until when it is good, for example because the credentials that signed it end sooner.
    :param lifetime: how long a token is good at most; if not given, as long as the provider says,
        or 15 minutes if it does not.
    :param refresh_at: at which part of its life the next one is fetched.
    :param keep: how many tokens to keep; when the server refuses one, and no new one can be had,
        the one before it is given.
    :param timeout: how long the provider may take.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        lifetime: float | None = None,
        refresh_at: float = 0.8,
        keep: int = 3,
        timeout: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        seconds = "more than 0 seconds, and finite"
        mistakes = unmet(
            ("lifetime", lifetime, lifetime is None or 0 < lifetime < math.inf, seconds),
            ("refresh_at", refresh_at, 0 < refresh_at < 1, "between 0 and 1"),
            ("keep", keep, keep >= 1, "at least 1"),
            ("timeout", timeout, 0 < timeout < math.inf, seconds),
        )
        refuse("CachedTokens", mistakes)
        self._provider = provider
        self._lifetime = lifetime
        self._refresh_at = refresh_at
        self._timeout = timeout
        self._clock = clock
        self._kept: deque[_Kept] = deque(maxlen=keep)
        self._flight = SingleFlight()
        self._timers = Timers(clock)
        self._refresh: asyncio.Task[None] | None = None
        self._used = False
        self._suspicious = False
        self._home = (os.getpid(), 0)
        #: How many tokens were fetched, how many fetches failed, how many tokens were rejected.
        self.fetched = 0
        self.failures = 0
        self.rejected = 0

    async def get(self) -> str:
        """A token that is good now; waits only if there is none."""
        self._used = True
        self._come_home()
        kept = self._best()
        if kept is None:
            await self._flight.do("token", self._fetch)
            kept = self._best()
        elif self._suspicious:
            # It is older than one that the server refused: only if no new one can be had.
            await self._refresh_quietly()
            kept = self._best()
        if kept is None:
            raise TokenError("the provider gave a token that is over already: check its clock")
        if self._now() >= kept.refresh_at:
            self._refresh_soon()
        return kept.value

    def reject(self, value: str) -> None:
        """The server did not accept this one: fetch another at the next `get()`."""
        for kept in [kept for kept in self._kept if kept.value == value]:
            self._kept.remove(kept)
            self.rejected += 1
            self._suspicious = True

    def close(self) -> None:
        """Fetch nothing more in the background."""
        self._timers.cancel_all()
        if self._refresh is not None:
            self._refresh.cancel()

    def _best(self) -> _Kept | None:
        now = self._now()
        good = [kept for kept in self._kept if now < kept.good_until]
        return max(good, key=lambda kept: kept.good_until, default=None)

    async def _fetch(self) -> None:
        clock = self._clock or Clock.current()
        asked_at, asked_at_wall = clock.monotonic(), clock.wall()
        try:
            async with asyncio.timeout(self._timeout):
                token = _checked(await run_callback(self._provider, name="moored-token"))
        except TimeoutError:
            self.failures += 1
            raise TokenError(
                f"the token provider did not answer within {self._timeout:g} s"
            ) from None
        except Exception:
            self.failures += 1
            raise
        life = self._lifetime or (LIFETIME if token.expires_at is None else math.inf)
        if token.expires_at is not None:
            life = min(life, token.expires_at - asked_at_wall)
        self.fetched += 1
        self._suspicious = False
        refresh_at = asked_at + life * self._refresh_at
        self._kept.append(_Kept(token.value, asked_at + life, refresh_at))
        self._used = False
        self._timers.set("refresh", refresh_at, self._on_time)

    def _on_time(self) -> None:
        # Nobody has asked since the last one: then nobody needs the next one either.
        if self._used:
            self._refresh_soon()

    def _refresh_soon(self) -> None:
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.get_running_loop().create_task(
                self._refresh_quietly(), name="moored-token-refresh"
            )

    async def _refresh_quietly(self) -> None:
        try:
            await self._flight.do("token", self._fetch)
        except Exception as error:
            best = self._best()
            left = duration(best.good_until - self._now()) if best else "none"
            log.warning(
                "a token could not be refreshed (%s); the old one is good for: %s",
                describe(error),
                left,
            )

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()

    def _come_home(self) -> None:
        """What is under way belongs to one loop of one process; the tokens are everybody's."""
        home = (os.getpid(), id(asyncio.get_running_loop()))
        if self._home != home:
            self._home = home
            self._flight = SingleFlight()
            self._timers, self._refresh = Timers(self._clock), None

    def __repr__(self) -> str:
        best = self._best()
        state = f"good for {duration(best.good_until - self._now())}" if best else "none yet"
        return f"<CachedTokens: {state}, {self.fetched} fetched, {self.failures} failed>"


class _Kept(NamedTuple):
    value: str
    good_until: float
    refresh_at: float


def _checked(found: object) -> Token:
    token = Token(found) if isinstance(found, str) else found
    if not isinstance(token, Token) or not isinstance(token.value, str) or not token.value:
        raise TokenError(
            f"the token provider returned {type(found).__name__}: return a text that is not empty, "
            "or a Token"
        )
    if not isinstance(token.expires_at, float | int | None):
        raise TokenError(
            f"the token provider returned a {type(token.expires_at).__name__} as expires_at: "
            "return a text, or a Token whose expires_at is in seconds since 1970"
        )
    return token
