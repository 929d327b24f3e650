"""Leases in Redis: per key a sorted set of the live ones, by when they end.

=======================  ===========  =========================================================
name                     type         what it holds
=======================  ===========  =========================================================
``PREFIX:{KEY}:live``    sorted set   id → the microsecond at which the lease ends
``PREFIX:{KEY}:who``     hash         id → fence, creation, ttl and holder
``PREFIX:{KEY}:fence``   string       the last fence that was given
``PREFIX:{KEY}:rate``    string       the microsecond at which the rate limit is full again
=======================  ===========  =========================================================

The braces put all names of one key into one slot of a Redis Cluster. Every name has an expiry that
lies behind the last moment at which it means anything, so nothing is left behind.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._store import Grant, Held, Holder, Request, Taken
from ._config import RedisConfig
from ._link import Call, RedisLink
from ._scripts import ACQUIRE, HELD, RELEASE, RENEW, TAKE, Script

__all__ = ["RedisStore"]

_SECOND = 1_000_000
#: How long an idle key's fence is kept; after that the clock alone makes the next one greater.
_FENCE_KEPT_MS = 7 * 24 * 3600 * 1000
#: How many leases one script call takes: a script keeps the whole server busy while it runs.
_BATCH = 500


class RedisStore:
    """Leases and rate limits in Redis, by the server's own time."""

    def __init__(self, config: RedisConfig) -> None:
        self._link = RedisLink(config)
        self._prefix = config.prefix

    @property
    def warnings(self) -> tuple[str, ...]:
        """What about the server's own configuration puts leases at risk; empty before `open`."""
        return self._link.warnings

    async def open(self) -> None:
        """Reach the server, and look whether it is configured to keep what it is given."""
        await self._link.reach()

    async def close(self) -> None:
        """Let go of the connections; leases stay as they are."""
        await self._link.close()

    async def acquire(self, request: Request) -> Grant | None:
        """Give a lease if fewer than the limit live, else None."""
        keys = self._names(request.key, "live", "who", "fence")
        ttl = _micros(request.ttl)
        arguments = (request.id, request.limit, ttl, _packed(request.holder), _FENCE_KEPT_MS)
        (fence,) = await self._link.run(ACQUIRE, [Call(keys, arguments)])
        return None if fence is None else Grant(request.id, int(fence))

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases by their ttl from now; False for each that does not live any more."""
        return await self._each(RENEW, requests, lambda r: (r.id, _micros(r.ttl)))

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that did not live."""
        return await self._each(RELEASE, requests, lambda r: (r.id,))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with at most `burst` at once."""
        call = Call(self._names(key, "rate"), (repr(float(rate)), burst, tokens))
        ((granted, wait),) = await self._link.run(TAKE, [call])
        return Taken(int(granted), int(wait) / _SECOND)

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases, of one key or of all."""
        keys = [key] if key is not None else await self._keys()
        calls = [Call(self._names(each, "live", "who")) for each in keys]
        found = await self._link.run(HELD, calls)
        return [
            _held(each, *flat[n : n + 3])
            for each, flat in zip(keys, found, strict=True)
            for n in range(0, len(flat), 3)
        ]

    async def _each(
        self,
        script: Script,
        requests: Sequence[Request],
        arguments: Callable[[Request], tuple[Any, ...]],
    ) -> list[bool]:
        """Run a script over requests of any keys, and put its answers back into their order."""
        groups = list(_grouped(requests))
        calls = [
            Call(
                self._names(requests[group[0]].key, "live", "who"),
                tuple(value for n in group for value in arguments(requests[n])),
            )
            for group in groups
        ]
        answers = [False] * len(requests)
        for group, flags in zip(groups, await self._link.run(script, calls), strict=True):
            for n, flag in zip(group, flags, strict=True):
                answers[n] = bool(flag)
        return answers

    async def _keys(self) -> list[str]:
        """The keys that have leases."""
        before, after = f"{self._prefix}:{{", "}:live"
        names = await self._link.names(f"{_literal(before)}*{after}")
        return [name[len(before) : -len(after)] for name in names]

    def _names(self, key: str, *parts: str) -> tuple[str, ...]:
        return tuple(f"{self._prefix}:{{{key}}}:{part}" for part in parts)

    def __repr__(self) -> str:
        return f"<RedisStore {self._link.config.place}, prefix {self._prefix}>"


def _grouped(requests: Sequence[Request]) -> Iterator[list[int]]:
    """The positions of requests with the same key, in groups that are not too large."""
    keys: dict[str, list[int]] = {}
    for n, request in enumerate(requests):
        keys.setdefault(request.key, []).append(n)
    for found in keys.values():
        for start in range(0, len(found), _BATCH):
            yield found[start : start + _BATCH]


def _micros(seconds: float) -> int:
    return math.ceil(seconds * _SECOND)


def _packed(holder: Holder) -> str:
    known = [holder.service_name, holder.owner, holder.host, holder.pid]
    return json.dumps(known, ensure_ascii=False)


def _held(key: str, lease: str, known: str, left: str) -> Held:
    # Who holds it is for people: a lease without it, by whatever hand, still counts.
    fence, created, _, holder = known.split(" ", 3) if known else ("0", "0", "0", '["","","",0]')
    return Held(
        key=key,
        id=lease,
        fence=int(fence),
        holder=Holder(*json.loads(holder)),
        created_at=int(created) / _SECOND,
        expires_in=int(left) / _SECOND,
    )


def _literal(text: str) -> str:
    """The text as a pattern that matches itself alone."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)
