"""The client: one interface for every store."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Recorder,
    Supervisor,
    counted,
    duration,
    redacted,
    refuse,
    start_task,
)

from . import _connect
from ._errors import LeaseError, StoreUnavailable
from ._exclusive import Exclusive
from ._keeper import Keeper, new_id
from ._lease import Lease
from ._lease_table import LeaseTable
from ._policy import OnUnavailable, Policy, check_key, check_ttl
from ._rate import RateLimit
from ._statistics import LeaseStatistics
from ._store import Held, Holder, Request, Store
from ._store_calls import StoreCalls, StoreKnownDown

__all__ = ["Leases", "connect"]

TTL = 180.0
RATE = 100.0


def connect(
    url: str,
    *,
    service_name: str | None = None,
    owner: str | None = None,
    on_unavailable: OnUnavailable = "local",
    local_limit: int | None = None,
    renew_every: float = 60.0,
    margin: float | None = None,
    timeout: float = 5.0,
    clock: Clock | None = None,
    recorder: Recorder | None = None,
    name: str = "leases",
) -> Leases:
    """Return a client of the store at this URL; use it with `async with`.

    :param url: `memory://`, `postgresql://…`, `redis://…` or `dynamodb://TABLE?…`.
    :param service_name: stored with each lease, to identify its holder; default: the program's
        name.
    :param owner: stored with each lease: the part of the service that holds it; default: the
        service name.
    :param on_unavailable: what `acquire` does while the store is unavailable: "local" applies the
        limit within this process and logs a warning, "refuse" raises `StoreUnavailable`.
    :param local_limit: how many leases of a key this process may hold in an outage; default: the
        key's limit.
    :param renew_every: seconds between renewals; at most a third of the ttl.
    :param margin: seconds by which a holder's deadline is earlier than the expiry in the store,
        because clocks drift and holders need time to stop; default: a tenth of the ttl, at most
        5 s.
    :param timeout: timeout of one call to the store, in seconds.
    """
    clock = clock or Clock.current()
    return Leases(
        _connect.open_store(url, clock=clock),
        place=redacted(url),
        service_name=service_name,
        owner=owner,
        policy=Policy(
            on_unavailable=on_unavailable,
            local_limit=local_limit,
            renew_every=renew_every,
            margin=margin,
            timeout=timeout,
        ),
        clock=clock,
        recorder=recorder,
        name=name,
    )


class Leases:
    """A client for leases and rate limits that all processes with the same store share.

    `connect()` creates one from a URL. Leaving its `async with` block releases all its leases.
    """

    def __init__(
        self,
        store: Store,
        *,
        place: str = "",
        service_name: str | None = None,
        owner: str | None = None,
        policy: Policy | None = None,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        name: str = "leases",
    ) -> None:
        self._place = place or type(store).__name__
        self._service_name = service_name or Path(sys.argv[0]).name or "python"
        self._owner = owner or self._service_name
        self._policy = policy or Policy()
        self._name = name
        self._clock = clock or Clock.current()
        self._recorder = recorder or Recorder(clock=self._clock)
        self._table = LeaseTable(self._policy, chance=self._clock.random)
        self._calls = StoreCalls(
            store, self._place, name, self._policy, self._clock, self._recorder
        )
        self._counts = self._calls.counts
        self._keeper = Keeper(self._table, self._calls)
        self._pid = os.getpid()
        self._state = "new"
        self._supervisor: Supervisor | None = None
        self._closing: asyncio.Task[None] | None = None
        # The loop that opened the client; its store and its leases work only there.
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the store and start renewing leases; `async with` calls it.

        With on_unavailable="local" this succeeds even if the store is unavailable.
        """
        if self._state != "new":
            raise LeaseError(f"{self!r} was opened before: create a new one with connect()")
        self._state = "open"
        self._loop = asyncio.get_running_loop()
        try:
            await self._reach()
            await self._supervise()
        except BaseException:
            self._state = "closed"
            await self._calls.close()
            raise

    async def _reach(self) -> None:
        if self._policy.on_unavailable == "refuse":
            await self._calls.open()
            return
        with suppress(StoreUnavailable):
            # A short timeout: the service can start without the store, and the keeper retries.
            await self._calls.open(timeout=self._policy.timeout)

    async def _supervise(self) -> None:
        backoff = Backoff(0.1, 5.0, clock=self._clock)
        self._supervisor = Supervisor(
            self._name,
            children=[Child("keeper", self._keeper.run, backoff=backoff)],
            intensity=None,  # leases must be renewed, however often the keeper fails
            recorder=self._recorder,
            clock=self._clock,
        )
        await self._supervisor.start()

    async def close(self) -> None:
        """Notify the holders, release all leases, and disconnect.

        If the caller is cancelled, this continues in the background; later calls wait for it. It
        does nothing in a forked child: the leases and connections belong to the parent.
        """
        if self._pid != os.getpid():
            return
        if self._state == "open":
            self._state = "closed"
            self._closing = start_task(self._close(), name=f"{self._name}-close")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._supervisor is not None:
                await self._supervisor.stop()
            await self._keeper.close()
        finally:
            await self._calls.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- leases --------------------------------------------------------------------------------

    async def acquire(
        self, key: str, *, limit: int, ttl: float = TTL, owner: str | None = None
    ) -> Lease | None:
        """Acquire a lease if fewer than `limit` of this key are live in the cluster; else None.

        It does not wait for a lease to become free. In an outage it grants a local lease or raises
        `StoreUnavailable`, as configured. A lease with limit 1 is never local: two processes would
        each take itself for the only owner.
        """
        self._check_open()
        request = self._request(key, limit, ttl, owner)
        try:
            return await self._acquire(request)
        except StoreUnavailable as error:
            if self._policy.on_unavailable != "local" or limit == 1:
                raise
            return self._acquire_locally(request, error)

    def exclusive(
        self,
        key: str,
        *,
        ttl: float = TTL,
        wait: float | None = None,
        owner: str | None = None,
        cancel: bool = True,
    ) -> Exclusive:
        """Return a block that holds the key exclusively: `async with leases.exclusive(key)`.

        Entering the block waits up to `wait` seconds for the lease, then raises `LeaseRefused`;
        None waits without limit. When the lease is lost, the block is cancelled and raises
        `LeaseLost`; with `cancel=False` the block runs to its end and then raises `LeaseLost`.
        """
        return Exclusive(self, key, ttl=ttl, wait=wait, owner=owner, cancel=cancel)

    def rate_limit(
        self,
        key: str,
        *,
        rate: float = RATE,
        burst: int | None = None,
        batch: int = 1,
        hold: float | None = None,
        local_rate: float | None = None,
    ) -> RateLimit:
        """Return a rate limit that all processes share: at most rate·w + burst in any w seconds.

        :param rate: tokens per second.
        :param burst: tokens that may be used at once; default: those of one second.
        :param batch: tokens to fetch in one call, to save calls to the store.
        :param hold: seconds for which a token may be used after it was requested; of several, each
            further one 1/rate longer. They cost hold·rate tokens of the burst; default: half of it.
        :param local_rate: the rate within this process in an outage; default: `rate`.
        """
        return RateLimit(
            self._calls,
            key,
            rate=rate,
            burst=burst,
            batch=batch,
            hold=hold,
            local_rate=local_rate if self._policy.on_unavailable == "local" else 0.0,
        )

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of a key, or of all keys, of all holders in the cluster."""
        self._check_open()
        return await self._calls.do("held", lambda: self._calls.store.held(key))

    async def revoke(self, id: str, key: str) -> bool:  # noqa: A002 - the store's own name
        """End a lease of any holder; returns whether it was live.

        Its holder is notified at its next renewal; until then the limit may be exceeded.
        """
        self._check_open()
        request = Request(key, id, 1, TTL, self._holder(None))
        (ended,) = await self._calls.do("release", lambda: self._calls.store.release([request]))
        return ended

    # -- monitoring ----------------------------------------------------------------------------

    def statistics(self) -> LeaseStatistics:
        """Return the state and the counters of this client."""
        return LeaseStatistics(
            held=len(self._table),
            local=len(self._table.local()),
            in_doubt=self._table.doubts,
            available=self._calls.opened and self._calls.health.up,
            **self._counts,
        )

    @property
    def name(self) -> str:
        """The name of this client in the recorder and in metrics."""
        return self._name

    @property
    def recorder(self) -> Recorder:
        """The recorder of this client's events and their causes."""
        return self._recorder

    def __repr__(self) -> str:
        local = len(self._table.local())
        held = counted(len(self._table), "lease") + (f" ({local} local)" if local else "")
        health = self._calls.health
        state = self._state
        if state == "open" and not health.up:
            state = f"no answer for {duration(self._clock.monotonic() - health.since)}"
        return f"<Leases {self._place}: {state}, {held}>"

    # -- helpers -------------------------------------------------------------------------------

    async def _acquire(self, request: Request) -> Lease | None:
        sent_at = self._clock.monotonic()
        timeout = (request.ttl - self._table.margin(request.ttl)) / 2
        try:
            grant = await self._calls.do(
                "acquire", lambda: self._calls.store.acquire(request), timeout=timeout
            )
        except StoreKnownDown:
            raise
        except BaseException:
            self._keeper.doubt(request, unanswered=True)
            raise
        if grant is None:
            self._counts["refused"] += 1
            return None
        self._check_usable(request, sent_at)
        self._counts["acquired"] += 1
        return self._keeper.keep(self._table.granted(request, grant, sent_at))

    def _check_usable(self, request: Request, sent_at: float) -> None:
        """Raise if the lease expired before its response arrived, or the client was closed."""
        if self._state != "open":
            self._counts["left_to_time"] += 1
            self._check_open()
        took = self._clock.monotonic() - sent_at
        if took >= request.ttl - self._table.margin(request.ttl):
            self._keeper.doubt(request)
            raise StoreUnavailable(
                f"{self._place} granted a lease of {request.key!r} after {took:.1f} s, too late "
                f"for its ttl of {request.ttl:g} s: use a longer ttl"
            )

    def _acquire_locally(self, request: Request, error: StoreUnavailable) -> Lease | None:
        if not self._table.has_local_room(request):
            self._counts["local_refused"] += 1
            return None
        self._counts["local_granted"] += 1
        self._calls.record(f"granted a local lease of {request.key!r}", "info", error)
        # Under a new id: the store may have seen the first one.
        request = self._request(request.key, request.limit, request.ttl, request.holder.owner)
        return self._keeper.keep(self._table.granted_locally(request))

    def _request(self, key: str, limit: int, ttl: float, owner: str | None) -> Request:
        mistakes = [*check_key(key), *check_ttl(ttl, self._table.margin(ttl))]
        if limit < 1:
            mistakes.append(f"limit={limit!r} must be at least 1")
        refuse("acquire", mistakes)
        return Request(key, new_id(self._clock), limit, ttl, self._holder(owner))

    def _holder(self, owner: str | None) -> Holder:
        return Holder(self._service_name, owner or self._owner, socket.gethostname(), os.getpid())

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise LeaseError(
                f"{self!r} and its leases belong to the parent process {self._pid} of this fork: "
                "create a new client with connect()"
            )
        if self._state != "open":
            hint = "use `async with`" if self._state == "new" else "create a new one with connect()"
            raise LeaseError(f"{self!r} is not open: {hint}")
