"""Leases in Postgres: a row for each live one, counted under a lock of its key.

============  ====================================================================================
table         what it holds
============  ====================================================================================
``leases``    a row per lease: key, id, fence, when it ends, its ttl, its holder
``fences``    the last fence that was given for a key
``rates``     for a rate limit, the microsecond at which it is full again
``guards``    the newest fence that a protected resource has seen (see `fenced`)
============  ====================================================================================

Dead rows are deleted by whoever asks for the same key; those of keys that nobody asks for any more,
by a sweep that every client does now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from moored.kernel import Clock, Tasks

from .._errors import LeaseError, StoreMisconfigured
from .._store import Grant, Held, Holder, Request, Taken
from ._config import PostgresConfig
from ._layout import Layout
from ._link import PostgresLink, Row
from ._sql import Statements

__all__ = ["PostgresStore"]

log = logging.getLogger("moored.leases")

#: How often a client sweeps, in seconds, give or take a half: many of them must not do it at once.
_SWEEP_EVERY = 600.0


class PostgresStore:
    """Leases and rate limits in Postgres, by the server's own time."""

    def __init__(self, config: PostgresConfig, *, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._link = PostgresLink(config, clock=clock)
        self._sql = Statements(config.schema)
        self._ready = False
        self._sweep_at = 0.0
        self._sweeps = Tasks()

    async def open(self) -> None:
        """Connect, and make the tables where they are missing and that is allowed."""
        await self._prepare()

    async def close(self) -> None:
        """Let go of the connections; leases stay as they are."""
        await self._sweeps.cancel()
        await self._link.close()

    async def acquire(self, request: Request) -> Grant | None:
        """Give a lease if fewer than the limit live, else None."""
        holder = request.holder
        rows = await self._run(
            self._sql.acquire,
            key=request.key,
            id=request.id,
            limit=request.limit,
            ttl=request.ttl,
            service_name=holder.service_name,
            owner=holder.owner,
            host=holder.host,
            pid=holder.pid,
        )
        return Grant(request.id, rows[0][0]) if rows else None

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases by their ttl from now; False for each that does not live any more."""
        done = await self._each(self._sql.renew, requests, ttls=[r.ttl for r in requests])
        self._sweep_if_due()
        return [(r.key, r.id) in done for r in requests]

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that did not live."""
        done = await self._each(self._sql.release, requests)
        answers = []
        for request in requests:
            answers.append((request.key, request.id) in done)
            # Named twice, it ended once.
            done.discard((request.key, request.id))
        return answers

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with at most `burst` at once."""
        rows = await self._run(self._sql.take, key=key, rate=rate, burst=burst, tokens=tokens)
        ((granted, wait),) = rows
        return Taken(int(granted), int(wait) / 1_000_000)

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases, of one key or of all."""
        return [_held(row) for row in await self._run(self._sql.held, key=key)]

    async def _each(
        self, statements: bytes, requests: Sequence[Request], **more: Any
    ) -> set[tuple[str, str]]:
        """Which of the requests a statement over all of them has found."""
        if not requests:
            return set()
        keys, ids = [r.key for r in requests], [r.id for r in requests]
        return set(await self._run(statements, keys=keys, ids=ids, **more))

    async def _run(self, statements: bytes, **parameters: Any) -> list[Row]:
        if not self._ready:
            await self._prepare()
        return await self._link.run(statements, parameters)

    async def _prepare(self) -> None:
        layout = Layout.of(await self._link.run(self._sql.layout), self._config)
        if layout.is_missing:
            await self._make(layout)
        else:
            layout.check()
        self._ready = True

    async def _make(self, layout: Layout) -> None:
        try:
            await self._link.run(self._sql.make_layout(with_schema=not layout.has_schema))
        except StoreMisconfigured as error:
            raise layout.refused(error) from error

    def _sweep_if_due(self) -> None:
        """Now and then, begin to delete what is over; whoever renews does not wait for it."""
        now = self._clock.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY * (0.5 + self._clock.random.random())
        self._sweeps.start(self._sweep(), name="sweep of old leases")

    async def _sweep(self) -> None:
        try:
            await self._run(self._sql.sweep)
        except LeaseError as error:
            log.warning("old rows were not swept, which can wait: %s", error)

    def __repr__(self) -> str:
        return f"<PostgresStore {self._config.place}, schema {self._config.schema}>"


def _held(row: Row) -> Held:
    key, lease, fence, service_name, owner, host, pid, created, left = row
    return Held(key, lease, fence, Holder(service_name, owner, host, pid), created, left)
