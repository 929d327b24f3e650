"""The client: one interface over every store."""

from __future__ import annotations

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
)

from . import _connect
from ._counts import Counts, LeaseStatistics
from ._errors import LeaseError, StoreUnavailable
from ._exclusive import Exclusive
from ._keeper import Keeper, new_id
from ._lease import Lease
from ._lease_table import LeaseTable
from ._policy import OnUnavailable, Policy, check_key, check_ttl
from ._rate import RateLimit
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
    """A client of the store that the URL names; use it with `async with`.

    :param url: `memory://`, `postgresql://…`, `redis://…` or `dynamodb://TABLE?…`.
    :param service_name: stored with each lease, for people; the program's name if not given.
    :param owner: stored with each lease too: the part of the service that holds it.
    :param on_unavailable: what `acquire` does while the store does not answer: "local" goes on
        with a limit of this process alone, loudly; "refuse" raises `StoreUnavailable`.
    :param local_limit: how many leases of a key this process may hold in an outage; the key's
        limit if not given.
    :param renew_every: seconds between renewals; a third of the ttl where that is less.
    :param margin: seconds before a lease ends in the store at which it is over here, because
        clocks drift and holders need time to stop; a tenth of the ttl, at most 5 s, if not given.
    :param timeout: seconds that one call of the store may take.
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
    """Leases and rate limits that all users of one store agree on.

    `connect()` makes one from a URL. Leaving its context gives back everything that it holds.
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
        self._counts = Counts()
        self._table = LeaseTable(self._policy, chance=self._clock.random)
        self._calls = StoreCalls(
            store,
            place=self._place,
            name=name,
            policy=self._policy,
            clock=self._clock,
            recorder=self._recorder,
            counts=self._counts,
        )
        self._keeper = Keeper(self._table, self._calls)
        self._pid = os.getpid()
        self._state = "new"
        self._supervisor: Supervisor | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and begin to keep leases; `async with` does it.

        With on_unavailable="local" a store that does not answer is no reason to fail.
        """
        if self._state != "new":
            raise LeaseError(f"{self!r} has been opened before: make a new one with connect()")
        self._state = "open"
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
            # Not for long: the service can start without, and the keeper goes on trying.
            await self._calls.open(patience=self._policy.timeout)

    async def _supervise(self) -> None:
        backoff = Backoff(0.1, 5.0, clock=self._clock)
        self._supervisor = Supervisor(
            self._name,
            children=[Child("keeper", self._keeper.run, backoff=backoff)],
            intensity=None,  # however often it fails, somebody must go on renewing
            recorder=self._recorder,
            clock=self._clock,
        )
        await self._supervisor.start()

    async def close(self) -> None:
        """Tell the holders that it is over, give everything back, and disconnect.

        In a forked child it does nothing: the leases and the connections are the parent's.
        """
        if self._state != "open" or self._pid != os.getpid():
            return
        self._state = "closed"
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
        """A lease, if fewer than `limit` of this key live in the whole cluster; else None.

        It never waits for one to become free. In an outage it gives a local lease, or raises
        `StoreUnavailable`, as configured; a lease with limit 1 is never local, because then two
        processes would each believe that they are the only one.
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
        """`async with leases.exclusive(key) as lease`: the only owner of the key in the cluster.

        `wait` is for how many seconds to wait for it before `LeaseRefused` is raised; None waits
        as long as it takes. When the lease is lost, the block is cancelled and ends with
        `LeaseLost`; with `cancel=False` it goes on, and ends with it all the same.
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
        """A rate that all processes share: no window of w seconds sees more than rate·w + burst.

        :param burst: how many at once; as many as in a second, if not given.
        :param batch: how many tokens to fetch at once, to save calls of the store.
        :param hold: seconds for which a token may be used after it was asked for. They are paid
            for out of the burst, at the rate; half of the burst, if not given.
        :param local_rate: the rate of this process alone in an outage; `rate`, if not given.
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
        """The live leases of a key, or of all keys, whoever holds them."""
        self._check_open()
        return await self._calls.do("held", lambda: self._calls.store.held(key))

    async def revoke(self, id: str, key: str) -> bool:  # noqa: A002 - the word that is stored
        """End a lease, whoever holds it; returns whether there was one.

        Its holder learns of it at its next renewal; until then there may be one too many.
        """
        self._check_open()
        request = Request(key, id, 1, TTL, self._holder(None))
        (ended,) = await self._calls.do("release", lambda: self._calls.store.release([request]))
        return ended

    # -- for people ----------------------------------------------------------------------------

    def statistics(self) -> LeaseStatistics:
        """This client in numbers."""
        return self._counts.snapshot(
            held=len(self._table),
            local=len(self._table.local()),
            in_doubt=self._table.doubts,
            available=self._calls.opened and self._calls.health.up,
        )

    @property
    def recorder(self) -> Recorder:
        """Where this client records what happens, and why."""
        return self._recorder

    def __repr__(self) -> str:
        local = len(self._table.local())
        held = counted(len(self._table), "lease") + (f" ({local} local)" if local else "")
        health = self._calls.health
        state = self._state
        if state == "open" and not health.up:
            state = f"no answer for {duration(self._clock.monotonic() - health.since)}"
        return f"<Leases {self._place}: {state}, {held}>"

    # -- small things --------------------------------------------------------------------------

    async def _acquire(self, request: Request) -> Lease | None:
        sent_at = self._clock.monotonic()
        patience = (request.ttl - self._table.margin(request.ttl)) / 2
        try:
            grant = await self._calls.do(
                "acquire", lambda: self._calls.store.acquire(request), patience=patience
            )
        except StoreKnownDown:
            raise
        except BaseException:
            self._keeper.doubt(request, asked=True)
            raise
        if grant is None:
            self._counts.refused += 1
            return None
        self._check_usable(request, sent_at)
        self._counts.acquired += 1
        return self._keeper.keep(self._table.granted(request, grant, sent_at))

    def _check_usable(self, request: Request, sent_at: float) -> None:
        """A lease that is over when it arrives (this process was stopped, say) is none."""
        if self._state != "open":
            self._counts.left_to_time += 1
            self._check_open()
        took = self._clock.monotonic() - sent_at
        if took >= request.ttl - self._table.margin(request.ttl):
            self._keeper.doubt(request)
            raise StoreUnavailable(
                f"{self._place} gave a lease of {request.key!r} after {took:.1f} s, which is too "
                f"late for a ttl of {request.ttl:g} s"
            )

    def _acquire_locally(self, request: Request, error: StoreUnavailable) -> Lease | None:
        most = self._policy.local_limit
        if self._table.count(request.key) >= (request.limit if most is None else most):
            self._counts.local_refused += 1
            return None
        self._counts.local_granted += 1
        text = f"a local lease of {request.key!r} was given"
        self._recorder.record(self._name, text, kind="info", cause=error)
        # Under an id of its own: the store may have seen the other one.
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
                f"{self!r} belongs to process {self._pid}, from which this one was forked, and so "
                "do its leases: make a new one with connect()"
            )
        if self._state != "open":
            hint = "use `async with`" if self._state == "new" else "make a new one with connect()"
            raise LeaseError(f"{self!r} is not open: {hint}")
