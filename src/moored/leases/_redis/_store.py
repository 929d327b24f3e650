"""The Redis store: for each key a sorted set of the live leases, by their expiry.

=======================  ===========  =========================================================
Redis key                type         contents
=======================  ===========  =========================================================
``PREFIX:{KEY}:live``    sorted set   id → the microsecond at which the lease expires
``PREFIX:{KEY}:who``     hash         id → fence, creation, ttl and holder
``PREFIX:{KEY}:fence``   string       the last fence that was granted
``PREFIX:{KEY}:rate``    string       the microsecond at which the rate limit is full again
=======================  ===========  =========================================================

The braces put all Redis keys of one lease key into one hash slot of a Redis Cluster. Every Redis
key expires after the last moment at which it is needed, so nothing is left behind.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

from .._store import Grant, Held, Holder, Request, Taken
from ._config import RedisConfig
from ._link import Call, RedisLink
from ._scripts import ACQUIRE, HELD, RELEASE, RENEW, TAKE, Script

__all__ = ["RedisStore"]

_SECOND = 1_000_000
#: How long the fence of an unused key is kept; after that the server's clock makes the next one
#: greater.
_FENCE_KEPT_MS = 7 * 24 * 3600 * 1000
#: Leases in one script call: the server does nothing else while a script runs.
_BATCH = 500


class RedisStore:
    """Leases and rate limits in Redis, by the server's clock."""

    def __init__(self, config: RedisConfig) -> None:
        self._link = RedisLink(config)
        self._prefix = config.prefix

    async def open(self) -> None:
        """Connect, and warn about server settings that put leases at risk."""
        await self._link.check()

    async def close(self) -> None:
        """Close the connections; leases stay as they are."""
        await self._link.close()

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None."""
        keys = self._names(request.key, "live", "who", "fence")
        ttl = _micros(request.ttl)
        arguments = (request.id, request.limit, ttl, _packed(request.holder), _FENCE_KEPT_MS)
        (fence,) = await self._link.run(ACQUIRE, [Call(keys, arguments)])
        return None if fence is None else Grant(request.id, int(fence))

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live."""
        return await self._each(RENEW, requests, lambda r: (r.id, _micros(r.ttl)))

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        return await self._each(RELEASE, requests, lambda r: (r.id,))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
        call = Call(self._names(key, "rate"), (repr(float(rate)), burst, tokens))
        ((granted, wait),) = await self._link.run(TAKE, [call])
        return Taken(int(granted), int(wait) / _SECOND)

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key, or of all keys."""
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
        """Run a script over requests of any keys; returns its replies in the requests' order."""
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
        """Return the keys that have leases."""
        before, after = f"{self._prefix}:{{", "}:live"
        names = await self._link.scan(f"{_literal(before)}*{after}")
        return [name[len(before) : -len(after)] for name in names]

    def _names(self, key: str, *parts: str) -> tuple[str, ...]:
        return tuple(f"{self._prefix}:{{{key}}}:{part}" for part in parts)

    def __repr__(self) -> str:
        return f"<RedisStore {self._link.config.place}, prefix {self._prefix}>"


def _grouped(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Yield the positions of requests with the same key, in groups of at most `_BATCH`."""
    keys: dict[str, list[int]] = {}
    for n, request in enumerate(requests):
        keys.setdefault(request.key, []).append(n)
    for found in keys.values():
        for start in range(0, len(found), _BATCH):
            yield found[start : start + _BATCH]


def _micros(seconds: float) -> int:
    return math.ceil(seconds * _SECOND)


def _packed(holder: Holder) -> str:
    return json.dumps(astuple(holder), ensure_ascii=False)


def _held(key: str, lease_id: str, known: str, left: str) -> Held:
    # The hash entry is for operators: a lease whose entry was deleted by hand still counts.
    fence, created, _, holder = known.split(" ", 3) if known else ("0", "0", "0", '["","","",0]')
    return Held(
        key=key,
        id=lease_id,
        fence=int(fence),
        holder=Holder(*json.loads(holder)),
        created_at=int(created) / _SECOND,
        expires_in=int(left) / _SECOND,
    )


def _literal(text: str) -> str:
    """Escape a string for use in a SCAN pattern."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)
