"""Tokens: passwords that expire, cached and renewed in the background."""

from __future__ import annotations

import asyncio
import logging
import math
import os
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

#: The lifetime of a token whose provider does not set one: the default of AWS.
LIFETIME = 900.0


class Token(NamedTuple):
    """A password that expires."""

    value: str
    #: When it expires, in seconds since 1970; None if the provider does not know.
    expires_at: float | None = None

    def __repr__(self) -> str:
        # Without the value, which must not get into logs.
        return f"Token('…', expires_at={self.expires_at!r})"


class TokenProvider(Protocol):
    """A plain or async function that returns a new token; a plain one is called in a thread."""

    def __call__(self) -> str | Token | Awaitable[str | Token]:
        """Return a new token."""


class Tokens(Protocol):
    """The source of the refiller's tokens."""

    async def get(self) -> str:
        """Return a valid token."""

    def reject(self, value: str) -> None:
        """Don't return this token again: the server rejected it."""


Provider: TypeAlias = Callable[[], str | Token | Awaitable[str | Token]]


class CachedTokens:
    """Caches the token of one identity, and fetches the next one before the current one expires.

    At `refresh_at` of a token's lifetime the next one is fetched in the background, if `get()` was
    called since the last fetch. Until then, and while the provider fails, `get()` returns the
    current token as long as it is valid. `get()` waits only if there is no valid token.

    :param provider: returns a token; sync (called in a thread) or async. It may return a `Token` to
        set when it expires, for example because the credentials that signed it expire earlier.
    :param lifetime: the maximum lifetime of a token in seconds; by default until the `expires_at`
        of the provider, or 15 minutes if there is none.
    :param refresh_at: the part of a token's lifetime after which the next one is fetched.
    :param timeout: how long the provider may take, in seconds.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        lifetime: float | None = None,
        refresh_at: float = 0.8,
        timeout: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        seconds = "more than 0 seconds, and finite"
        mistakes = unmet(
            ("lifetime", lifetime, lifetime is None or 0 < lifetime < math.inf, seconds),
            ("refresh_at", refresh_at, 0 < refresh_at < 1, "between 0 and 1"),
            ("timeout", timeout, 0 < timeout < math.inf, seconds),
        )
        refuse("CachedTokens", mistakes)
        self._provider = provider
        self._lifetime = lifetime
        self._refresh_at = refresh_at
        self._timeout = timeout
        self._clock = clock
        self._cached: _CachedToken | None = None
        self._flight = SingleFlight()
        self._timers = Timers(clock)
        self._refresh: asyncio.Task[None] | None = None
        self._used = False
        self._bound_to = (os.getpid(), 0)
        #: Counters: tokens fetched, failed fetches, tokens rejected by the server.
        self.fetched = 0
        self.failures = 0
        self.rejected = 0

    async def get(self) -> str:
        """Return a valid token; wait only if there is none in the cache."""
        self._used = True
        self._bind_to_loop()
        cached = self._valid()
        if cached is None:
            await self._flight.do("token", self._fetch)
            cached = self._valid()
        if cached is None:
            raise TokenError("the provider returned an expired token: check the clocks")
        if self._now() >= cached.refresh_at:
            self._refresh_soon()
        return cached.value

    def reject(self, value: str) -> None:
        """Drop a token that the server rejected; the next `get()` fetches a new one."""
        if self._cached is not None and self._cached.value == value:
            self._cached = None
            self.rejected += 1

    def close(self) -> None:
        """Stop fetching tokens in the background."""
        self._timers.cancel_all()
        if self._refresh is not None:
            self._refresh.cancel()

    def _valid(self) -> _CachedToken | None:
        cached = self._cached
        return cached if cached is not None and self._now() < cached.good_until else None

    async def _fetch(self) -> None:
        clock = self._clock or Clock.current()
        requested_at, requested_at_wall = clock.monotonic(), clock.wall()
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
            life = min(life, token.expires_at - requested_at_wall)
        self.fetched += 1
        refresh_at = requested_at + life * self._refresh_at
        self._cached = _CachedToken(token.value, requested_at + life, refresh_at)
        self._used = False
        self._timers.set("refresh", refresh_at, self._on_time)

    def _on_time(self) -> None:
        # If no token was used since the last fetch, the next one is not needed yet.
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
            valid = self._valid()
            left = duration(valid.good_until - self._now()) if valid else "none"
            log.warning(
                "fetching a new token failed (%s); the current one is valid for: %s",
                describe(error),
                left,
            )

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()

    def _bind_to_loop(self) -> None:
        """Start anew on another loop or in a forked child; the cached tokens remain valid there."""
        home = (os.getpid(), id(asyncio.get_running_loop()))
        if self._bound_to != home:
            self._bound_to = home
            self._flight = SingleFlight()
            self._timers, self._refresh = Timers(self._clock), None

    def __repr__(self) -> str:
        valid = self._valid()
        state = f"valid for {duration(valid.good_until - self._now())}" if valid else "none yet"
        return f"<CachedTokens: {state}, {self.fetched} fetched, {self.failures} failed>"


class _CachedToken(NamedTuple):
    value: str
    good_until: float
    refresh_at: float


def _checked(found: object) -> Token:
    token = Token(found) if isinstance(found, str) else found
    if not isinstance(token, Token) or not isinstance(token.value, str) or not token.value:
        raise TokenError(
            f"the token provider returned {type(found).__name__}: return a str that is not empty, "
            "or a Token"
        )
    if not isinstance(token.expires_at, float | int | None):
        raise TokenError(
            f"the token provider returned a {type(token.expires_at).__name__} as expires_at: "
            "return a str, or a Token whose expires_at is in seconds since 1970"
        )
    return token
