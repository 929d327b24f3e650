"""Leases for programs with threads: the same methods, and every call waits for its answer.

The work is done by the asynchronous client, on the library's own loop thread; leases are renewed
there while the program's threads do something else. All objects here may be shared by threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from moored.kernel import Clock, LoopThread, Recorder

from . import _client, _lease, _rate
from ._counts import LeaseStatistics
from ._errors import LeaseError, LeaseLost
from ._policy import OnUnavailable
from ._store import Held

__all__ = ["SyncLease", "SyncLeases", "SyncRateLimit", "connect"]

T = TypeVar("T")


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
    recorder: Recorder | None = None,
    name: str = "leases",
) -> SyncLeases:
    """A client of the store that the URL names; use it with `with`.

    The parameters are those of `moored.leases.connect`.
    """
    client = _client.connect(
        url,
        service_name=service_name,
        owner=owner,
        on_unavailable=on_unavailable,
        local_limit=local_limit,
        renew_every=renew_every,
        margin=margin,
        timeout=timeout,
        clock=Clock.system(),
        recorder=recorder,
        name=name,
    )
    return SyncLeases(client)


class SyncLeases:
    """Leases and rate limits that all users of one store agree on, for threads."""

    def __init__(self, client: _client.Leases) -> None:
        self._client = client
        self._runner = _Runner()

    def open(self) -> None:
        """Connect, and begin to keep leases; `with` does it."""
        self._runner.run(self._client.open())

    def close(self) -> None:
        """Tell the holders that it is over, give everything back, and disconnect."""
        if self._runner.here:
            self._runner.run(self._client.close())

    def acquire(
        self, key: str, *, limit: int, ttl: float = _client.TTL, owner: str | None = None
    ) -> SyncLease | None:
        """A lease, if fewer than `limit` of this key live in the whole cluster; else None."""
        return self._obtain(self._client.acquire(key, limit=limit, ttl=ttl, owner=owner))

    @contextmanager
    def exclusive(
        self,
        key: str,
        *,
        ttl: float = _client.TTL,
        wait: float | None = None,
        owner: str | None = None,
    ) -> Iterator[SyncLease]:
        """`with leases.exclusive(key) as lease`: the only owner of the key in the cluster.

        A thread cannot be interrupted: when the lease is lost the block goes on, and ends with
        `LeaseLost`. A long block should look at `lease.live` now and then.
        """
        block = self._client.exclusive(key, ttl=ttl, wait=wait, owner=owner, cancel=False)
        lease = self._obtain(block.acquire())
        assert lease is not None
        with lease:
            yield lease
        if lease.error is not None:
            raise lease.error

    def rate_limit(
        self,
        key: str,
        *,
        rate: float = _client.RATE,
        burst: int | None = None,
        batch: int = 1,
        hold: float | None = None,
        local_rate: float | None = None,
    ) -> SyncRateLimit:
        """A rate that all processes share; the parameters are those of the asynchronous one."""
        limit = self._client.rate_limit(
            key, rate=rate, burst=burst, batch=batch, hold=hold, local_rate=local_rate
        )
        return SyncRateLimit(limit, self._runner)

    def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases of a key, or of all keys, whoever holds them."""
        return self._runner.run(self._client.held(key))

    def revoke(self, id: str, key: str) -> bool:  # noqa: A002 - the word that is stored
        """End a lease, whoever holds it; returns whether there was one."""
        return self._runner.run(self._client.revoke(id, key))

    def statistics(self) -> LeaseStatistics:
        """This client in numbers."""
        return self._client.statistics()

    @property
    def recorder(self) -> Recorder:
        """Where this client records what happens, and why."""
        return self._client.recorder

    def _obtain(self, work: Coroutine[Any, Any, _lease.Lease | None]) -> SyncLease | None:
        lease = self._runner.obtain(work)
        return None if lease is None else SyncLease(lease, self._runner)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._client)


class SyncLease(_lease.LeaseInfo):
    """A right that the whole cluster agrees on, until its deadline; for threads."""

    def __init__(self, lease: _lease.Lease, runner: _Runner) -> None:
        super().__init__(lease._entry)
        self._lease = lease
        self._runner = runner

    @property
    def live(self) -> bool:
        """Whether it can be relied on now, in this process."""
        return self._lease.live

    @property
    def error(self) -> LeaseLost | None:
        """Why it was lost, if it was."""
        return self._lease.error

    def remaining(self) -> float:
        """Seconds until the deadline; 0.0 when it has passed, or the lease was given back."""
        return self._lease.remaining()

    def renew(self) -> None:
        """Extend it now; there is no need to. Raises `LeaseLost` or `StoreUnavailable`."""
        self._runner.run(self._lease.renew())

    def release(self) -> None:
        """Give it back; harmless when it is over, or was given back before, or in a fork."""
        if self._runner.here:
            self._runner.run(self._lease.release())

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call this with the error when the lease is lost; at once if it has been already.

        It runs in the library's thread, where calls that wait are refused: set an event there.
        """
        self._runner.run(_call(lambda: self._lease.on_lost(callback)))

    def lost(self, timeout: float | None = None) -> LeaseLost | None:
        """Wait until it is lost and return why; None once it is released, or after the timeout."""
        future: Future[LeaseLost | None] = self._runner.submit(self._lease.lost())
        try:
            return future.result(timeout)
        except TimeoutError:
            return None
        finally:
            future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return repr(self._lease)


class SyncRateLimit:
    """A limit of `rate` per second with at most `burst` at once, shared by all its users."""

    def __init__(self, limit: _rate.RateLimit, runner: _Runner) -> None:
        self._limit = limit
        self._runner = runner

    def take(self, n: int = 1) -> float:
        """Take n tokens, or none: returns 0.0 if they were taken, else the seconds to wait."""
        return self._runner.run(self._limit.take(n))

    def wait(self, n: int = 1) -> None:
        """Take n tokens, and wait for them as long as it takes; who came first is served first."""
        self._runner.run(self._limit.wait(n))

    @property
    def left(self) -> float:
        """How many could be taken at once, as far as this client knows: others take some too."""
        return self._limit.left

    def __repr__(self) -> str:
        return repr(self._limit)


class _Runner:
    """Runs coroutines on the shared loop thread, for the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = LoopThread.shared()

    @property
    def here(self) -> bool:
        """Whether this is the process that made it; a forked child has neither loop nor leases."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait here for the outcome."""
        return self._checked(work).run(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it."""
        return self._checked(work).submit(work)

    def obtain(self, work: Coroutine[Any, Any, _lease.Lease | None]) -> _lease.Lease | None:
        """As `run`; but a lease that comes after its caller was interrupted is given back."""
        gone = threading.Event()
        obtained: list[_lease.Lease] = []

        async def deliver() -> _lease.Lease | None:
            lease = await work
            if lease is not None:
                obtained.append(lease)
                if gone.is_set():
                    await lease.release()
            return lease

        try:
            return self._checked(work).run(deliver())
        except BaseException:
            # Each side leaves its mark before it looks for the other's, so one of them sees both.
            gone.set()
            for lease in obtained:
                self._thread.spawn(lease.release(), name="give back a lease")
            raise

    def _checked(self, work: Coroutine[Any, Any, Any]) -> LoopThread:
        if not self.here:
            work.close()
            raise LeaseError(
                f"this client belongs to process {self._pid}, from which this one was forked, and "
                "so do its leases: make a new one with connect()"
            )
        return self._thread


async def _call(function: Callable[[], None]) -> None:
    function()
