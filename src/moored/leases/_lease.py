"""A lease, as its holder sees it."""

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
    """What a lease is, for asyncio and for threads."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def key(self) -> str:
        """What it is a right to."""
        return self._entry.request.key

    @property
    def id(self) -> str:
        """The id under which the store knows it; a local one may get another when exchanged."""
        return self._entry.id

    @property
    def owner(self) -> str:
        """The owner that is stored with it."""
        return self._entry.request.holder.owner

    @property
    def ttl(self) -> float:
        """For how many seconds it lives from each renewal on."""
        return self._entry.request.ttl

    @property
    def fence(self) -> int:
        """The number to pass to what the lease protects; 0, which is always too old, if local."""
        return self._entry.fence

    @property
    def local(self) -> bool:
        """Whether this process gave it itself, because the store could not be asked."""
        return self._entry.local

    @property
    def deadline(self) -> float:
        """When it is over unless it is renewed, in monotonic seconds; infinity while local."""
        return self._entry.deadline


class Lease(LeaseInfo):
    """A right that the whole cluster agrees on, until its deadline.

    It is renewed in the background. Whoever holds it is told when it is over (`on_lost`,
    `lost()`), before the store could give it to another. As an async context manager it is
    released at the end.
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
        """Whether it can be relied on now, in this process.

        It looks at the clock, so it is right even where nobody could be told yet, as in a process
        that was stopped for a while. In a forked child it is False: the parent has the lease.
        """
        held = self._error is None and not self._released
        return held and self.remaining() > 0 and self._pid == os.getpid()

    @property
    def error(self) -> LeaseLost | None:
        """Why it was lost, if it was."""
        return self._error

    def remaining(self) -> float:
        """Seconds until the deadline; 0.0 when it has passed, or the lease was given back."""
        if self._released or self._error is not None:
            return 0.0
        return max(0.0, self.deadline - self._keeper.clock.monotonic())

    async def renew(self) -> None:
        """Extend it now. There is no need to: this is for who wants to know, or cannot wait.

        Raises `LeaseLost` when it is over, and `StoreUnavailable` when nobody can be asked.
        """
        if self._released:
            raise LeaseError(f"the lease of {self.key!r} has been given back: acquire another")
        if self._error is None:
            await self._keeper.renew_now(self)
        if self._error is not None:
            raise self._error

    async def release(self) -> None:
        """Give it back; harmless when it is over, or was given back before.

        When the store cannot be reached this does not fail: the lease is given back later, and
        ends there by itself in any case. In a forked child it does nothing: the parent has it.
        """
        if self._pid != os.getpid() or not self._end():
            return
        await self._keeper.release(self._entry)

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call this with the error when the lease is lost; at once if it has been already.

        It runs in the event loop and must not block; what it raises is logged and counted.
        A lease that is released is not lost.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError(
                f"{callback!r} is a coroutine function, and nobody would await it: "
                "pass a function, or await lease.lost() in a task"
            )
        if self._error is not None:
            self._call(callback, self._error)
        elif not self._released:
            self._callbacks.append(callback)

    async def lost(self) -> LeaseLost | None:
        """Wait until the lease is lost, and return why; None once it is released instead."""
        while self._error is None and not self._released:
            if self._ended is None:
                self._ended = asyncio.Event()
            await self._ended.wait()
        return self._error

    def _lose(self, error: LeaseLost) -> None:
        """Tell the holder, once; called by the keeper."""
        if self._error is not None or self._released:
            return
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
            # The others must be told all the same.
            self._keeper.counts.callback_errors += 1
            log.error("a holder of %r could not be told", self.key, exc_info=failure)

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
        return f"{duration(left)} left" if left else "over"
