"""The Postgres store: a row for each lease, counted under an advisory lock of its key.

============  ====================================================================================
table         contents
============  ====================================================================================
``leases``    a row per lease: key, id, fence, expiry, ttl, holder
``fences``    the last fence that was granted for a key
``rates``     for a rate limit, the microsecond at which it is full again
``guards``    the newest fence that a protected resource has seen (see `fenced`)
============  ====================================================================================

An acquire deletes the expired rows of its key; a sweep, which every client runs now and then,
deletes those of keys that are no longer used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moored.kernel import Clock, Tasks

from .._errors import LeaseError, StoreMisconfigured
from .._store import Grant, Held, Holder, Request, Taken, ended_once
from ._config import PostgresConfig
from ._layout import Layout
from ._link import PostgresLink, Row
from ._sql import Statements

__all__ = ["PostgresStore"]

log = logging.getLogger("moored.leases")

#: Seconds between two sweeps of a client, plus or minus a half: clients must not sweep together.
_SWEEP_EVERY = 600.0


class PostgresStore:
    """Leases and rate limits in Postgres, by the server's clock."""

    def __init__(self, config: PostgresConfig, *, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._link = PostgresLink(config, clock=clock)
        self._sql = Statements(config.schema)
        self._ready = False
        self._sweep_at = 0.0
        self._sweeps = Tasks()

    async def open(self) -> None:
        """Connect, and create missing tables."""
        await self._prepare()

    async def close(self) -> None:
        """Close the connections; leases stay as they are."""
        await self._sweeps.cancel()
        await self._link.close()

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None."""
        rows = await self._run(
            self._sql.acquire,
            key=request.key,
            id=request.id,
            limit=request.limit,
            ttl=request.ttl,
            **asdict(request.holder),
        )
        return Grant(request.id, rows[0][0]) if rows else None

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live."""
        done = await self._each(self._sql.renew, requests, ttls=[r.ttl for r in requests])
        self._sweep_if_due()
        return [(r.key, r.id) in done for r in requests]

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        return ended_once(requests, await self._each(self._sql.release, requests))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
        rows = await self._run(self._sql.take, key=key, rate=rate, burst=burst, tokens=tokens)
        ((granted, wait),) = rows
        return Taken(int(granted), int(wait) / 1_000_000)

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key, or of all keys."""
        return [_held(row) for row in await self._run(self._sql.held, key=key)]

    async def _each(
        self, statements: bytes, requests: Sequence[Request], **more: Any
    ) -> set[tuple[str, str]]:
        """Run one statement for all requests; returns the keys and ids that it changed."""
        if not requests:
            return set()
        keys, ids = [r.key for r in requests], [r.id for r in requests]
        return set(await self._run(statements, keys=keys, ids=ids, **more))

    async def _run(self, statements: bytes, **parameters: Any) -> list[Row]:
        if not self._ready:
            await self._prepare()
        return await self._link.run(statements, parameters)

    async def _prepare(self) -> None:
        (row,) = await self._link.run(self._sql.layout)
        layout = Layout(self._config.place, self._config.schema, *row)
        if layout.is_complete:
            layout.check()
        else:
            await self._create(layout)
        self._ready = True

    async def _create(self, layout: Layout) -> None:
        try:
            await self._link.run(self._sql.create_layout(with_schema=not layout.has_schema))
        except StoreMisconfigured as error:
            raise layout.refused(error) from error

    def _sweep_if_due(self) -> None:
        """Start a sweep in the background if the last one was long ago."""
        now = self._clock.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY * (0.5 + self._clock.random.random())
        self._sweeps.start(self._sweep(), name="sweep expired leases")

    async def _sweep(self) -> None:
        try:
            await self._run(self._sql.sweep)
        except LeaseError as error:
            log.warning("could not delete expired rows, will retry later: %s", error)

    def __repr__(self) -> str:
        return f"<PostgresStore {self._config.place}, schema {self._config.schema}>"


def _held(row: Row) -> Held:
    key, lease_id, fence, service_name, owner, host, pid, created, left = row
    return Held(key, lease_id, fence, Holder(service_name, owner, host, pid), created, left)
