"""Leases for threads: the same methods as in `moored.leases`, but blocking.

The asynchronous client runs on the library's own loop thread and renews leases there. All objects
of this module may be shared by threads.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar

from moored.kernel import LoopThread, Recorder

from . import _client, _lease, _rate
from ._errors import LeaseError, LeaseLost
from ._statistics import LeaseStatistics
from ._store import Held

__all__ = ["SyncLease", "SyncLeases", "SyncRateLimit", "connect"]

P = ParamSpec("P")
T = TypeVar("T")


def _for_threads(make: Callable[P, _client.Leases]) -> Callable[P, SyncLeases]:
    def connect(*args: P.args, **options: P.kwargs) -> SyncLeases:
        """Return a client of the store at this URL; use it with `with`.

        The parameters are those of `moored.leases.connect`.
        """
        return SyncLeases(make(*args, **options))

    signature = inspect.signature(make).replace(return_annotation="SyncLeases")
    connect.__signature__ = signature  # type: ignore[attr-defined]
    return connect


connect = _for_threads(_client.connect)


class SyncLeases:
    """A client for leases and rate limits that all processes with the same store share."""

    def __init__(self, client: _client.Leases) -> None:
        self._client = client
        self._runner = _Runner()

    def open(self) -> None:
        """Open the store and start renewing leases; `with` calls it."""
        self._runner.run(self._client.open())

    def close(self) -> None:
        """Notify the holders, release all leases, and disconnect; ignored in a forked child."""
        if self._runner.in_own_process:
            self._runner.run(self._client.close())

    def acquire(
        self, key: str, *, limit: int, ttl: float = _client.TTL, owner: str | None = None
    ) -> SyncLease | None:
        """Acquire a lease if fewer than `limit` of this key are live in the cluster; else None."""
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
        """Hold the key exclusively in the cluster: `with leases.exclusive(key) as lease`.

        A thread cannot be interrupted: when the lease is lost, the block runs to its end and then
        raises `LeaseLost`. A long block should check `lease.live` regularly.
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
        """Return a rate limit that all processes share; parameters as in `Leases.rate_limit`."""
        limit = self._client.rate_limit(
            key, rate=rate, burst=burst, batch=batch, hold=hold, local_rate=local_rate
        )
        return SyncRateLimit(limit, self._runner)

    def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of a key, or of all keys, of all holders in the cluster."""
        return self._runner.run(self._client.held(key))

    def revoke(self, id: str, key: str) -> bool:  # noqa: A002 - the store's own name
        """End a lease of any holder; returns whether it was live."""
        return self._runner.run(self._client.revoke(id, key))

    def statistics(self) -> LeaseStatistics:
        """Return the state and the counters of this client."""
        return self._client.statistics()

    @property
    def name(self) -> str:
        """The name of this client in the recorder and in metrics."""
        return self._client.name

    @property
    def recorder(self) -> Recorder:
        """The recorder of this client's events and their causes."""
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
    """A lease that this process holds, for threads; it is renewed in the background."""

    def __init__(self, lease: _lease.Lease, runner: _Runner) -> None:
        super().__init__(lease._entry)
        self._lease = lease
        self._runner = runner

    @property
    def live(self) -> bool:
        """Whether the lease is held now, by this process."""
        return self._lease.live

    @property
    def error(self) -> LeaseLost | None:
        """Why the lease was lost; None if it was not."""
        return self._lease.error

    def remaining(self) -> float:
        """Seconds until the deadline; 0.0 if the lease has expired, was lost or released."""
        return self._lease.remaining()

    def renew(self) -> None:
        """Renew the lease now. Raises `LeaseLost` or `StoreUnavailable`."""
        self._runner.run(self._lease.renew())

    def release(self) -> None:
        """Release the lease; ignored if it was lost or released before, and in a forked child."""
        if self._runner.in_own_process:
            self._runner.run(self._lease.release())

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call `callback(error)` when the lease is lost; at once if it is lost already.

        The callback runs on the library's loop thread, where blocking calls are refused: let it
        set a `threading.Event`, for example.
        """
        self._runner.run(_call(lambda: self._lease.on_lost(callback)))

    def lost(self, timeout: float | None = None) -> LeaseLost | None:
        """Wait until the lease is lost, and return the error; None if released or timed out."""
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
    """A limit of `rate` tokens per second with a burst, shared by all processes; for threads."""

    def __init__(self, limit: _rate.RateLimit, runner: _Runner) -> None:
        self._limit = limit
        self._runner = runner

    def take(self, n: int = 1) -> float:
        """Take n tokens, or none: returns 0.0 if they were taken, else the seconds to wait."""
        return self._runner.run(self._limit.take(n))

    def wait(self, n: int = 1) -> None:
        """Take n tokens, waiting for them without limit; waiters are served in order."""
        self._runner.run(self._limit.wait(n))

    @property
    def left(self) -> float:
        """An estimate of the tokens that can be taken now: other processes take some, too."""
        return self._limit.left

    def __repr__(self) -> str:
        return repr(self._limit)


class _Runner:
    """Runs coroutines on the shared loop thread of the process that created this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread = LoopThread.shared()

    @property
    def in_own_process(self) -> bool:
        """Whether this is not a forked child, which has neither the loop nor the leases."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and wait for its result."""
        return self._checked(work).run(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, and return its future."""
        return self._checked(work).submit(work)

    def obtain(self, work: Coroutine[Any, Any, _lease.Lease | None]) -> _lease.Lease | None:
        """As `run`; a lease that is granted after its caller was interrupted is released."""
        interrupted = threading.Event()
        obtained: list[_lease.Lease] = []

        async def deliver() -> _lease.Lease | None:
            lease = await work
            if lease is not None:
                obtained.append(lease)
                if interrupted.is_set():
                    await lease.release()
            return lease

        try:
            return self._checked(work).run(deliver())
        except BaseException:
            # Each side sets its own flag before it reads the other's, so at least one releases.
            interrupted.set()
            for lease in obtained:
                self._thread.spawn(lease.release(), name="release a lease")
            raise

    def _checked(self, work: Coroutine[Any, Any, Any]) -> LoopThread:
        if not self.in_own_process:
            work.close()
            raise LeaseError(
                f"this client and its leases belong to the parent process {self._pid} of this "
                "fork: create a new client with connect()"
            )
        return self._thread


async def _call(function: Callable[[], None]) -> None:
    function()
