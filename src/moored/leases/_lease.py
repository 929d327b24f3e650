"""A lease, as its holder uses it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from moored.kernel import duration

from ._errors import LeaseError, LeaseLost

if TYPE_CHECKING:
    from ._keeper import Keeper
    from ._lease_table import Entry

__all__ = ["Lease", "LeaseInfo"]

log = logging.getLogger("moored.leases")


class LeaseInfo:
    """The properties of a lease that asyncio and threads share."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def key(self) -> str:
        """The key that was acquired."""
        return self._entry.request.key

    @property
    def id(self) -> str:
        """The lease's id in the store; the id of a local lease may change."""
        return self._entry.id

    @property
    def owner(self) -> str:
        """The owner that is stored with the lease."""
        return self._entry.request.holder.owner

    @property
    def ttl(self) -> float:
        """Seconds from a renewal to the expiry in the store."""
        return self._entry.request.ttl

    @property
    def fence(self) -> int:
        """The fencing token to pass to the protected resource; 0, which it rejects, if local."""
        return self._entry.fence

    @property
    def local(self) -> bool:
        """Whether this process granted the lease itself, because the store was unavailable."""
        return self._entry.local

    @property
    def deadline(self) -> float:
        """When the lease expires unless it is renewed, in monotonic seconds; infinity if local."""
        return self._entry.deadline


class Lease(LeaseInfo):
    """A lease that this process holds; the client renews it in the background.

    When the lease is lost, its holder is notified (`on_lost`, `lost()`) before the store can grant
    it to another holder. `async with lease` releases it at the end of the block.
    """

    __slots__ = ("_callbacks", "_ended", "_error", "_keeper", "_pid", "_released")

    def __init__(self, keeper: Keeper, entry: Entry) -> None:
        super().__init__(entry)
        self._keeper = keeper
        self._pid = os.getpid()
        self._released = False
        self._error: LeaseLost | None = None
        self._callbacks: list[Callable[[LeaseLost], object]] = []
        self._ended: asyncio.Event | None = None

    @property
    def live(self) -> bool:
        """Whether the lease is held now, by this process.

        The deadline is compared with the clock, so this is correct even before the holder was
        notified, as in a process that was suspended. It is False in a forked child: the parent
        holds the lease.
        """
        held = self._error is None and not self._released
        return held and self.remaining() > 0 and self._pid == os.getpid()

    @property
    def error(self) -> LeaseLost | None:
        """Why the lease was lost; None if it was not."""
        return self._error

    def remaining(self) -> float:
        """Seconds until the deadline; 0.0 if the lease has expired, was lost or released."""
        if self._released or self._error is not None:
            return 0.0
        return max(0.0, self.deadline - self._keeper.clock.monotonic())

    async def renew(self) -> None:
        """Renew the lease now, ahead of the renewals in the background.

        Raises `LeaseLost` if the lease is lost, and `StoreUnavailable` if the store does not
        answer.
        """
        if self._released:
            raise LeaseError(f"the lease of {self.key!r} has been released: acquire another")
        if self._error is None:
            await self._keeper.renew_now(self)
        if self._error is not None:
            raise self._error

    async def release(self) -> None:
        """Release the lease; ignored if it was lost or released before.

        If the store is unavailable, this succeeds, and the lease is released later, or expires in
        the store. It does nothing in a forked child: the parent holds the lease.
        """
        if self._pid != os.getpid() or not self._end():
            return
        await self._keeper.release(self._entry)

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call `callback(error)` when the lease is lost; at once if it is lost already.

        The callback runs in the event loop and must not block; its exceptions are logged and
        counted. It is not called for a lease that is released.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError(
                f"{callback!r} is a coroutine function, which would not be awaited: "
                "pass a plain function, or await lease.lost() in a task"
            )
        if self._error is not None:
            self._call(callback, self._error)
        else:
            self._callbacks.append(callback)

    async def lost(self) -> LeaseLost | None:
        """Wait until the lease is lost, and return the error; None once it is released."""
        while self._error is None and not self._released:
            if self._ended is None:
                self._ended = asyncio.Event()
            await self._ended.wait()
        return self._error

    def _lose(self, error: LeaseLost) -> None:
        """Notify the holder, once; called by the keeper."""
        self._error = error
        callbacks = self._callbacks
        self._wake()
        for callback in callbacks:
            self._call(callback, error)

    def _end(self) -> bool:
        if self._released or self._error is not None:
            return False
        self._released = True
        self._wake()
        return True

    def _wake(self) -> None:
        self._callbacks = []
        if self._ended is not None:
            self._ended.set()

    def _call(self, callback: Callable[[LeaseLost], object], error: LeaseLost) -> None:
        try:
            callback(error)
        except Exception as failure:
            # The remaining callbacks must run.
            self._keeper.counts["callback_errors"] += 1
            log.error("an on_lost callback of %r failed", self.key, exc_info=failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    def __repr__(self) -> str:
        local = "local " if self.local else ""
        return f"<Lease {self.key!r} of {self.owner}, {local}fence {self.fence}: {self._state()}>"

    def _state(self) -> str:
        if self._released:
            return "released"
        if self._error is not None:
            return f"lost ({self._error.reason})"
        if self.local:
            return "held by this process alone"
        left = self.remaining()
        return f"{duration(left)} left" if left else "expired"
